"""`Answers`: the answers that an attempt's agent discarded, as far as its later prompts show.

An answer was discarded if the agent continued without it: no later prompt repeats it, but one

- repeats another answer to the same prompt (a second request, or one of several samples), or
- continues the answer's prompt with a message other than the assistant's (it was left out), and none continues it with
  an assistant turn.

Everything else was used, including all answers of an agent that never sends one back as an assistant turn.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from treadle.core.types import Message
from treadle.rendering.identity import Value, call_ids, reasoning, value

_TAG_OR_FENCE = re.compile(r"</?\w[^<>\n]*>|```\w*")


class _Sent:
    """A message normalized for comparison, ignoring white space. latest: order of the last call with it."""

    def __init__(self, message: Message, said: Value) -> None:
        role, content, calls = said
        self.is_turn, self.text, self.latest = role in ("assistant", ""), _plain(content), -1
        self.calls = call_ids(message) | ({calls} if calls else set())

    def repeats(self, answer: _Answer) -> bool:
        if any(text in self.text for text in answer.texts) or self.calls & answer.reply.calls:
            return True
        if not self.is_turn:
            return any(part in self.text for part in answer.parts)
        if not self.text:
            return not (self.calls or answer.reply.text or answer.reply.calls)
        return any(part.startswith(self.text) for part in answer.texts + answer.parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """An answer.

    number: number of the step. place: place of the prompt. later: order of the first call that arrived afterwards.
    texts: content and thought. parts: text before, between and after tags and code fences.
    """

    number: int
    place: int
    later: int
    reply: _Sent
    texts: tuple[str, ...]
    parts: tuple[str, ...]


class Answers:
    """The calls of one attempt, each recorded with `ask` on arrival and with `answer` once answered."""

    def __init__(self) -> None:
        self._arrived = 0
        self._answers: list[_Answer] = []
        # by value, and its number of earlier occurrences in the prompt
        self._messages: dict[tuple[Value, int], _Sent] = {}
        self._places: dict[tuple[int, _Sent], int] = {}  # (place of a prompt, next message) -> place of both together
        self._continued: dict[tuple[int, bool], int] = {}  # (place, whether by an assistant turn) -> last such call
        self._raw: dict[str, tuple[Message, ...]] = {"": ()}

    def ask(self, messages: Sequence[Message], values: Sequence[Value] = ()) -> int:
        """Record the prompt of a call; return its place. values: values of its first messages, as far as known."""
        place, count = 0, Counter[Value]()
        for message, said in zip(messages, (*values, *map(value, messages[len(values) :])), strict=True):
            count[said] += 1
            if (sent := self._messages.get(key := (said, count[said]))) is None:
                sent = self._messages[key] = _Sent(message, said)
            sent.latest = self._continued[place, sent.is_turn] = self._arrived
            place = self._places.setdefault((place, sent), len(self._places) + 1)
        self._arrived += 1
        return place

    def ask_raw(self, text: str) -> int:
        """Record a raw prompt: the messages of its longest known prefix, and the rest as another message."""
        begun = max(filter(text.startswith, self._raw), key=len)
        rest = (Message(role="", content=text[len(begun) :]),) if text != begun else ()
        self._raw[text] = self._raw[begun] + rest
        return self.ask(self._raw[text])

    def answer(self, place: int, number: int, reply: Message) -> None:
        """Record the answer to a prompt at this place. number: number of its step."""
        sent = _Sent(reply, value(reply))
        texts = tuple(filter(None, (sent.text, _plain(reasoning(reply)))))
        parts = tuple(filter(None, map(_plain, _TAG_OR_FENCE.split(reply["content"]))))
        self._answers.append(_Answer(number, place, self._arrived, sent, texts, parts))

    def unused(self, played: Container[int]) -> list[int]:
        """Return the numbers of the steps with discarded answers. played: numbers to consider."""
        samples = defaultdict[int, list[_Answer]](list)
        for answer in self._answers:
            if answer.number in played:
                samples[answer.place].append(answer)
        if not any(self._goes_on(answer, by_turn=True) for answers in samples.values() for answer in answers):
            return []
        path, unused = list(self._places), list[int]()
        messages = sorted(self._messages.values(), key=lambda message: -message.latest)
        for place, answers in samples.items():
            left_out = {a for a in answers if self._goes_on(a, by_turn=False) and not self._goes_on(a, by_turn=True)}
            if len(answers) > 1 or left_out:
                own = set(_messages(path, place))
                repeated = {answer: _repeated(answer, own, messages) for answer in answers}
                last = max(repeated.values())
                unused += [a.number for a in answers if repeated[a] < 0 and (last >= a.later or a in left_out)]
        return sorted(unused)

    def _goes_on(self, answer: _Answer, by_turn: bool) -> bool:
        """Return whether a later prompt continues the answer's, by an assistant turn or by another message."""
        return self._continued.get((answer.place, by_turn), -1) >= answer.later


def _messages(path: Sequence[tuple[int, _Sent]], place: int) -> Iterator[_Sent]:
    while place:
        place, sent = path[place - 1]
        yield sent


def _repeated(answer: _Answer, own: Container[_Sent], messages: Sequence[_Sent]) -> int:
    """Return the order of the last call with a prompt that repeats the answer; -1 if there is none.

    own: messages of the answer's prompt, which do not count as repetitions. messages: latest ones first.
    """
    later = takewhile(lambda message: message.latest >= answer.later, messages)
    return next((message.latest for message in later if message not in own and message.repeats(answer)), -1)


def _plain(text: str) -> str:
    return " ".join(text.split())
