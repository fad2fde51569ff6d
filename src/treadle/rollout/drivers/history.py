"""`History`: the conversation of an attempt at an environment, which grows with each turn and may be replaced.

opening        system, task                                  messages of `reset`
a turn later   system, task, reply, observations
compacted      system, task, summary, last turns             if it becomes too long (`rollout.compaction`)
replaced       whatever the environment chooses              `EnvStep.history`
"""

from __future__ import annotations

from collections.abc import Sequence

from treadle.core.errors import DataError
from treadle.core.types import BreakCause, Message
from treadle.envs.base import INTRODUCTION, EnvStep
from treadle.rendering import identity


class History:
    """The messages for the next call.

    single_message: whether replies and observations are all in one assistant message. break_cause: why the next call
    does not continue the previous one, if messages alone do not show it.
    """

    def __init__(self, opening: Sequence[Message], single_message: bool = False) -> None:
        self.messages = list(opening)
        self.break_cause: BreakCause | None = None
        self._opening, self._single = list(opening), single_message

    @property
    def continues(self) -> bool:
        """Whether the next call continues the last message: a single message, or a reply begun by the task."""
        return (self._single or self.messages == self._opening) and self.messages[-1]["role"] == "assistant"

    def add(self, reply: Message, answer: EnvStep) -> None:
        """Append a reply, unless it was rejected, and the environment's answer."""
        before = self.messages if answer.rejected else self._with(reply)
        observations = list(answer.observations)
        if self._single:
            if any(message.get("images") for message in observations):
                raise DataError(
                    "an observation has an image, which the assistant's message cannot have that holds everything; set "
                    "rollout.conversation to turns"
                )
            text = "".join(message["content"] for message in (before[-1], *observations))
            before, observations = [*before[:-1], Message(role="assistant", content=text)], []
        after = [*(before if answer.history is None else answer.history), *observations]
        if answer.history is not None:
            self.break_cause = _replacement(before, after)
        elif not answer.rejected:
            # Otherwise the next call replaces the rejected one.
            self.break_cause = None
        self.messages = after

    def kept(self, last: int) -> list[Message] | None:
        """Return the turns to keep beside a summary; None if they include every reply.

        These are the last turns with at least `last` messages, so that no tool answer is separated from its call.
        """
        turns = self.messages[len(self._head(self.messages)) :]
        starts = [n for n, message in enumerate(turns) if message["role"] == "assistant"]
        start = max((n for n in starts if len(turns) - n >= last), default=0) if last else len(turns)
        return turns[start:] if starts and starts[0] < start else None

    def compact(self, summary: str, kept: Sequence[Message]) -> None:
        """Replace everything except the opening and the `kept` turns by a summary."""
        self.messages = [*self._head(), Message(role="user", content=INTRODUCTION + summary), *kept]
        self.break_cause = BreakCause.SUMMARY

    def _with(self, reply: Message) -> list[Message]:
        if not self.continues:
            return [*self.messages, reply]
        *messages, begun = self.messages
        return [*messages, {**reply, "content": begun["content"] + reply["content"]}]

    def _head(self, of: Sequence[Message] | None = None) -> list[Message]:
        """Return the opening without a reply begun by the task; only its part at the beginning of the messages `of`."""
        begun = self._opening[-1]["role"] == "assistant"
        head = self._opening[:-1] if begun else self._opening
        same = len(head) if of is None else identity.common(*([identity.value(m) for m in ms] for ms in (head, of)))
        return head[:same]


def _replacement(before: Sequence[Message], after: Sequence[Message]) -> BreakCause | None:
    """Return SUMMARY if fewer, new messages replaced several; None leaves the cause to rendering."""
    was, now = ([identity.value(message) for message in messages] for messages in (before, after))
    at = identity.common(was, now)
    was, now = was[at:], now[at:]
    carried = any(value in was for value in now if value[0] == "assistant")
    return BreakCause.SUMMARY if 0 < len(now) < len(was) and now[0] not in was and not carried else None
