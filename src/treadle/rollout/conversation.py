"""`Conversation`: the prompts of one session, rendered from messages so that recorded ids are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treadle.core.types import BreakCause, Ids, Message
from treadle.rollout.chat import ChatRenderer


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What one call sends.

    ids int32[P]. messages: what it was rendered from. break_cause: why it does not carry on the ids of the call that
    its messages continue; None where it does, or continues none.
    """

    ids: Ids
    messages: tuple[Message, ...]
    break_cause: BreakCause | None = None


class Conversation:
    """Renders one session's calls and remembers what was sampled.

    Calls may be rendered while others are still being sampled: what is recorded later can only be continued later.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._records: list[tuple[Prompt, Ids, Message]] = []

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Prompt:
        """The prompt of a call with these messages and tools (JSON schemas, as OpenAI's API has them).

        Raises DataError for a conversation that the template refuses.
        """
        for prompt, completion, reply in reversed(self._records):
            known = len(prompt.messages) + 1
            if known < len(messages) and [*prompt.messages, reply] == list(messages[:known]):
                previous = np.concatenate([prompt.ids, completion])
                ids = self._renderer.next(previous, prompt.messages, messages[known:])
                return Prompt(ids, tuple(messages))
        return Prompt(self._renderer.first(messages), tuple(messages))

    def record(self, prompt: Prompt, completion_ids: Ids, reply: Message) -> None:
        """Note what was sampled for `prompt`, and the message that was handed out for it."""
        self._records.append((prompt, completion_ids, reply))
