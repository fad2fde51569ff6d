"""`Answers`: the answers that an attempt's agent discarded by asking again.

An answer was discarded if its request was sent again (or asked for several choices) and the agent went on from another
of the answers: a later prompt continues that one, and none continues this one. Everything else counts as used, unless a
request's headers say otherwise (`ClientSession.take_verdicts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.core.types import Message
from treadle.rendering.identity import Value, value
from treadle.rollout.session import Reply


@dataclass(frozen=True, slots=True)
class _Answer:
    """number: of its step. place: of the conversation with the answer. later: how many requests came before it."""

    number: int
    place: int
    later: int


class Answers:
    """The answers to one attempt's conversations; two are the same if their messages are equal by `identity.value`."""

    def __init__(self) -> None:
        self._asked = 0
        self._places: dict[tuple[int, Value], int] = {}  # (place of a conversation, next message) -> place of both
        self._continued: dict[int, int] = {}  # place -> last request whose messages begin with that conversation
        self._answers: dict[int, list[_Answer]] = {}  # by place of the prompt

    def ask(self) -> int:
        """Return the number of a new request."""
        self._asked += 1
        return self._asked - 1

    def answer(self, request: int, messages: Sequence[Message], replies: Sequence[Reply]) -> None:
        """Record the answers to a request with these messages."""
        place = 0
        for said in replies[0].values or map(value, messages):
            place = self._after(place, said)
            self._continued[place] = max(request, self._continued.get(place, -1))
        for reply in replies:
            answer = _Answer(reply.number, self._after(place, value(reply.message)), self._asked)
            self._answers.setdefault(place, []).append(answer)

    def unused(self) -> list[int]:
        """Return the numbers of the steps with discarded answers."""
        unused = []
        for answers in self._answers.values():
            last = max(self._continued.get(answer.place, -1) for answer in answers)
            unused += [a.number for a in answers if a.place not in self._continued and last >= a.later]
        return sorted(unused)

    def _after(self, place: int, said: Value) -> int:
        return self._places.setdefault((place, said), len(self._places) + 1)
