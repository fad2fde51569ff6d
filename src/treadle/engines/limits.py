"""The limits of a model, and the refusal of calls beyond them."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.core.errors import EngineError
from treadle.core.types import Ids, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """Checks calls against a model's limits.

    vocabulary: ids are below it. context: most tokens of prompt and completion together.
    """

    vocabulary: int
    context: int

    def check_ids(self, ids: Ids, what: str) -> None:
        """Raise EngineError for no ids, and for ids outside the vocabulary."""
        if not len(ids) or ids.min() < 0 or ids.max() >= self.vocabulary:
            raise EngineError(f"{what} must be non-empty and in [0, {self.vocabulary})")

    def check_call(self, prompt: Ids, sampling: SamplingParams, session: str) -> None:
        """Raise EngineError for a prompt that `check_ids` refuses or that leaves no room for `max_tokens`."""
        self.check_ids(prompt, f"prompt ids of session {session!r}")
        if len(prompt) + sampling.max_tokens > self.context:
            raise EngineError(
                f"prompt of {len(prompt)} + max_tokens {sampling.max_tokens} exceeds the model's context "
                f"of {self.context}"
            )
