"""`RawPrompts`: prompts that a client writes itself, as text or ids, and their exact continuation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.core.errors import DataError
from treadle.core.types import Ids, Step
from treadle.rendering.chat import ChatRenderer

_CUT = 32  # limit on sampled tokens that a stop string and an end token hide from the client


class RawPrompts:
    """Turns raw prompts into ids, with the recorded ids of an earlier call where the text continues it.

    Text is matched against the decoded ids of earlier calls, prompt and completion; the longest wins.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._records: list[tuple[str, Step]] = []  # the prompt's text, and the call

    def ids(self, prompt: str | Sequence[int]) -> Ids:
        """Return the prompt's ids, int32[P]. Raises DataError for an empty prompt or ids outside the vocabulary."""
        if isinstance(prompt, str):
            kept, rest = self._longest(prompt)
            ids = np.concatenate([kept, self._renderer.encode(rest)])
        else:
            ids, size = np.asarray(prompt), self._renderer.vocabulary
            if ids.dtype.kind not in "iu" or ids.ndim != 1 or not ((ids >= 0) & (ids < size)).all():
                raise DataError(f"a prompt of token ids must be a list of integers in [0, {size})")
        if not len(ids):
            raise DataError("the prompt is empty: a completion needs at least one token before it")
        return ids.astype(np.int32)

    def record(self, step: Step) -> None:
        """Remember the call of a raw prompt, for prompts that continue it."""
        self._records.append((self._renderer.decode(step.prompt_ids), step))

    def _longest(self, text: str) -> tuple[Ids, str]:
        """Return the ids that can be kept, and the text after them."""
        best, length = np.empty(0, np.int32), 0
        for prompt, step in reversed(self._records):
            if len(prompt) > length and text.startswith(prompt):
                ids, same = self._kept(text, prompt, step)
                if len(same) > length:
                    best, length = ids, len(same)
        return best, text[length:]

    def _kept(self, text: str, prompt: str, step: Step) -> tuple[Ids, str]:
        """Return as many of the call's ids as the text repeats, without splitting any, and their text."""
        ids, start = step.full_ids, len(step.prompt_ids)
        for end in range(len(ids), max(start, len(ids) - _CUT), -1):
            decoded = self._renderer.decode(ids[:end])
            if text.startswith(decoded):
                return ids[:end], decoded
        return step.prompt_ids, prompt
