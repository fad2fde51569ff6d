"""`Answers`: which answers of an attempt its agent used, as far as its later prompts show it.

A prompt carries an answer if it repeats it: as a turn of the assistant, whole or edited (known by its place, its text,
or its tool calls), or if any message contains its text, its thought, or one of its longer lines. What an agent does
with an answer beyond that is not known here, and in doubt an answer was used.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from treadle.core.types import Message
from treadle.rendering.identity import Value, call_ids, flat, reasoning, value

_LINE, _WHOLE = 1, 2  # how an answer is carried
_LONG = 40  # characters of a line that stands for its answer: summaries and code are taken out of their tags and fences


@dataclass(slots=True, eq=False)
class Call:
    """A call of the attempt.

    order: by arrival. node: its prompt. basis: the last answer that its prompt carries. opened: the beginning of the
    turn that is continued. prompt: text of a raw one. Of its answer: number: of the step. ended: how many calls had
    arrived by then. fresh: no earlier prompt had this turn. carried: how it is carried, 0 if it is not. latest: the
    last call that builds on it.
    """

    order: int
    node: int
    basis: Call | None = None
    opened: str = ""
    prompt: str | None = None
    number: int = -1
    ended: int = 0
    sampled: str = ""
    value: Value = ("", "", "")
    texts: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    ids: frozenset[str] = frozenset()
    fresh: bool = True
    carried: int = 0
    latest: Call | None = None

    def carried_by(self, text: str) -> int:
        if any(part in text for part in self.texts):
            return _WHOLE
        return _LINE if any(line in text for line in self.lines) else 0

    def became(self, text: str, turn: Value) -> bool:
        """Whether the turn, whose text this is, may be the answer, edited."""
        return bool(_called(self.value) & _called(turn) or (text and any(text in part for part in self.texts)))


@dataclass(slots=True)
class _Place:
    """A message after others: number: of the prompt that ends with it. carried: the answers that it carries."""

    number: int
    carried: list[Call] = field(default_factory=list)


class Answers:
    """The calls of one attempt, each told of with `ask` when it arrives and with `answer` when it is answered.

    Prompts are kept as a tree of messages, so that each message is looked at once: when it is new, for the answers that
    were given before.
    """

    def __init__(self) -> None:
        self._arrived = 0
        self._answered: list[Call] = []
        self._places: dict[tuple[int, Value], _Place] = {}
        self._at: dict[int, list[Call]] = {}  # answered calls by prompt
        self._by_value: dict[Value, list[Call]] = {}
        self._turns: set[Value] = set()
        self._keeps_history = False  # whether any answer came back as a turn of the assistant

    def ask(self, messages: Sequence[Message], values: Sequence[Value], opened: str = "") -> Call:
        """Take the prompt of a call. values: of the messages. opened: content of a last one that is continued."""
        node, carried = 0, list[Call]()
        for message, said in zip(messages, values, strict=False):
            system = message["role"] == "system"  # some agents change it with every call
            place = self._place(0 if system else node, said, message)
            node = node if system else place.number
            carried += place.carried
        if opened:
            begun = value(Message(role="assistant", content=opened))
            same = [call for call in self._at.get(node, ()) if call.value == begun]
            for call in same:
                call.carried = _WHOLE
            carried += same
        return self._arrive(Call(self._arrived, node, opened=opened), carried)

    def ask_raw(self, text: str) -> Call:
        """Take the raw prompt of a call."""
        node, carried, prompt = 0, list[Call](), text
        begun = [call for call in self._answered if call.prompt is not None and text.startswith(call.prompt)]
        if begun:
            call = max(begun, key=lambda c: _covered(c, text))
            node, carried = call.node, [call.basis] if call.basis else []
            rest = _covered(call, text)
            if rest > len(call.prompt or ""):
                place = self._place(node, call.value, Message(role="assistant", content=call.sampled))
                node, carried = place.number, [*place.carried]
            text = text[rest:]
        if text:
            place = self._place(node, ("", text, ""), Message(role="", content=text))
            node = place.number
            carried += place.carried
            self._keeps_history |= bool(begun and place.carried)
        return self._arrive(Call(self._arrived, node, prompt=prompt), carried)

    def answer(self, call: Call, number: int, reply: Message) -> None:
        """Take a call's answer. number: of its step."""
        content = call.opened + reply["content"]
        reply = {**reply, "content": content}
        call.number, call.ended, call.sampled = number, self._arrived, content
        call.value, call.ids = value(reply), call_ids(reply)
        call.texts = tuple(filter(None, map(_plain, (content, reasoning(reply)))))
        call.lines = tuple(line for line in map(_plain, content.splitlines()) if len(line) >= _LONG)
        call.fresh = call.value not in self._turns
        self._answered.append(call)
        self._at.setdefault(call.node, []).append(call)
        self._by_value.setdefault(call.value, []).append(call)

    def unused(self, played: Container[int]) -> list[int]:
        """Return the numbers of the steps whose answers were thrown away. played: those that count at all.

        An answer is kept if a later prompt carries it, but not only in parts where another answer to the same prompt is
        carried whole. It is kept as the last one of the attempt if its prompt is that of the last call, or if it was
        given after that had come; and as the last one of a conversation that nobody went on with.
        An agent none of whose answers came back as a turn keeps no history: nothing is thrown away that one could see.
        """
        calls = [call for call in self._answered if call.number in played]
        if not calls or not self._keeps_history:
            return []
        last, best = max(calls, key=lambda call: call.order), dict[int, int]()
        for call in calls:
            best[call.node] = max(call.carried, best.get(call.node, 0))

        def used(call: Call) -> bool:
            if call.carried:
                return call.carried == best[call.node]
            latest = call.basis and call.basis.latest
            return call.node == last.node or call.ended > last.order or bool(latest and latest.node == call.node)

        return sorted(call.number for call in calls if not used(call))

    def _arrive(self, call: Call, carried: Sequence[Call]) -> Call:
        self._arrived += 1
        call.basis = carried[-1] if carried else None
        basis: Call | None
        for basis in carried:
            while basis is not None and basis.latest is not call:
                basis.latest, basis = call, basis.basis
        return call

    def _place(self, parent: int, said: Value, message: Message) -> _Place:
        place = self._places.get((parent, said))
        new = place is None
        if place is None:
            place = self._places[parent, said] = _Place(len(self._places) + 1)
        if message["role"] == "assistant":
            self._find_turn(place, parent, said, message, new)
        elif new:
            self._find_mentions(place, _plain(flat(message["content"])))
        return place

    def _find_turn(self, place: _Place, parent: int, said: Value, message: Message, new: bool) -> None:
        """Find whose answer a turn is; if nobody's, it may quote some."""
        here, ids = self._at.get(parent, []), call_ids(message)
        same = [call for call in here if call.value == said]
        self._keeps_history |= bool(same)
        if new:
            self._turns.add(said)
            if not same and any(said[1:]):
                same = self._by_value.get(said, [])
                self._keeps_history |= any(call.fresh for call in same)
        if not same and new:
            text = _plain(f"{flat(message['content'])} {reasoning(message)}")
            same = [call for call in self._answered if call.ids & ids]
            same = same or [call for call in here if call.became(text, said) or call.carried_by(text)] or here
            self._keeps_history |= bool(same)
            if not same:
                self._find_mentions(place, text, said)
        _carry(place, [call for call in same if call.ids & ids] or same, _WHOLE)

    def _find_mentions(self, place: _Place, text: str, turn: Value = ("", "", "")) -> None:
        for call in self._answered:
            if call.carried < _WHOLE:
                became = turn[0] and call.became(text, turn)
                _carry(place, [call], _WHOLE if became else call.carried_by(text))


def _carry(place: _Place, calls: Iterable[Call], how: int) -> None:
    for call in calls:
        if how and call not in place.carried:
            place.carried.append(call)
        call.carried = max(call.carried, how)


def _covered(call: Call, text: str) -> int:
    """Return how long a beginning of the text, which begins with the call's prompt, is prompt and completion."""
    length = len(call.prompt or "")
    return length + (len(call.sampled) if text.startswith(call.sampled, length) else 0)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _called(turn: Value) -> frozenset[str]:
    """Return names and arguments of the calls of a turn."""
    return frozenset(map(json.dumps, json.loads(turn[2] or "[]")))
