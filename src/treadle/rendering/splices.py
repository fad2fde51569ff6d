"""Find recorded replies in the rendered conversation, and decide which of them the template keeps.

A reply is kept if the template writes every part of the agent's message for it (thought, content, each tool call), with
thought and content unchanged except for outer white space. That text is then replaced by the recorded ids, from the
beginning of the turn to the sampled end token:

    ...<|im_end|>\\n[<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n4.<|im_end|>]\\n<|im_start|>user\\n...
                  `------------------------- one splice -------------------------´

The message decides, not the sampled text: a template that reformats a tool call, or adds an empty thought, keeps it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.core.types import BreakCause
from treadle.rendering.identity import Record, reasoning
from treadle.rendering.structure import secret_text
from treadle.rendering.template import Plain


@dataclass(frozen=True, slots=True)
class Splice:
    """The turn of message `message`, text[start:end]. stopped: whether it ends with the sampled end token."""

    start: int
    end: int
    message: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class _Window:
    """Bounds of a turn: its head begins at `start` or later, its parts span `first` to `last`, it ends by `limit`.

    first, last: None if no part shows a mark. hidden: whether an earlier message may be in the window too.
    tight: whether the limit is a mark of the next message.
    """

    start: int
    first: int | None
    last: int | None
    limit: int
    hidden: bool
    tight: bool


def locate(
    text: str, messages: Sequence[Plain], replies: Mapping[int, Record], marked: Marked | None, ends: re.Pattern[str]
) -> tuple[list[Splice], Mapping[int, BreakCause]]:
    """Find the turns of recorded replies (by message number) in rendered text.

    Returns them in order, and why other recorded messages (or their end tokens) could not be kept.

    messages: messages as rendered. marked: None if marks change the template's output; turns are then found by their
    heads alone. ends: end tokens of an assistant's turn.
    """
    places = marked or Marked()
    limits = _limits(places, len(messages), len(text))
    splices: list[Splice] = []
    lost: dict[int, BreakCause] = {}
    # Text before `at` is done; hidden: an assistant message after it has no mark.
    at, hidden = 0, False
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            if places.fences.get(number, -1) > at:
                at, hidden = places.fences[number], False
            continue
        parts = places.parts.get(number, {})
        inside = [place for pair in parts.values() for place in pair]
        turn: Splice | BreakCause | None = None
        if number in replies:
            ends_of = min(inside, default=None), max(inside, default=None)
            window = _Window(at, *ends_of, limits[number], hidden, limits[number] < limits[number + 1])
            turn = _change(text, message, parts) if marked else None
            turn = turn or _turn(text, number, message, replies[number], window, ends)
        if isinstance(turn, Splice):
            splices.append(turn)
            at, hidden = turn.end, False
            if replies[number].stop and not turn.stopped:
                lost[number] = BreakCause.END_TOKEN_REWRITTEN
            continue
        if turn:
            lost[number] = turn
        at, hidden = (max(at, *inside), False) if inside else (at, True)
    return splices, lost


def _limits(places: Marked, messages: int, end: int) -> list[int]:
    """Return, for each message and for the end, the first mark of any later message."""
    limits = [end] * (messages + 1)
    for number in range(messages - 2, -1, -1):
        after = number + 1
        marks = [places.fences.get(after, end), *(start for start, _ in places.parts.get(after, {}).values())]
        limits[number] = min(limits[after], *marks)
    return limits


def _change(text: str, message: Plain, parts: Mapping[Part, tuple[int, int]]) -> BreakCause | None:
    """Return the cause if the marks show that the template omits or alters a part."""
    for part, wanted, cause in _wanted(message):
        if part not in parts:
            return cause
        start, end = parts[part]
        if isinstance(part, str) and text[start:end] != wanted:
            return BreakCause.REWRITTEN
    return None


def _wanted(message: Plain) -> Iterator[tuple[Part, str, BreakCause]]:
    """Yield each non-blank part, its text, and the cause if it is missing."""
    if thought := reasoning(message):
        yield "reasoning", thought, BreakCause.THINKING_STRIPPED
    for number, call in enumerate(message.get("tool_calls") or ()):
        if name := call["function"]["name"].strip():
            yield number, name, BreakCause.TOOL_CALL_REWRITTEN
    if content := message["content"].strip():
        yield "content", content, BreakCause.REWRITTEN


def _turn(
    text: str, number: int, message: Plain, reply: Record, window: _Window, ends: re.Pattern[str]
) -> Splice | BreakCause:
    """Find the turn, from its head to the end token."""
    if window.first is not None:
        start = text.rfind(reply.head, window.start, window.first)
    elif window.hidden:
        # Take the last of several empty turns.
        start = text.rfind(reply.head, window.start, window.limit) if window.tight else -1
    else:
        start = text.find(reply.head, window.start, window.limit)
    parts_end = start + len(reply.head) if window.last is None else window.last
    end = ends.search(text, parts_end, window.limit) if start >= 0 else None
    if end is None:
        return BreakCause.REWRITTEN
    # Without marks, every part must be in the text.
    if window.first is None:
        written = text[start : end.start()]
        for _, wanted, cause in _wanted(message):
            if wanted not in written:
                return cause
    stopped = end[0] == reply.stop
    return Splice(start, end.end() if stopped else end.start(), number, stopped)


Part = int | str
"""`"content"`, `"reasoning"`, or the number of a tool call."""

_FENCE = "fence"
_SECRET = secret_text()
_MARKS = re.compile(f"{_SECRET}([0-9]+){_SECRET}")
# Where to put a fence: inside a word, otherwise after a character; never in a tag, which templates look for.
_PLACES = (re.compile(r"(?s).*\w(?=\w)(?!\w*>)"), re.compile(r"(?s).*[^\s<>](?!\w*>)"))
_SEARCHED = 400  # length of a message's end searched for a fence position, in characters


@dataclass(slots=True)
class Marked:
    """Positions of message parts in a text.

    parts: message number -> part -> (start, end). fences: message number -> position, in order of messages.
    """

    parts: dict[int, dict[Part, tuple[int, int]]] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)


class Marks:
    """Secret texts around the parts of messages, to find them in the rendered text.

        {"role": "assistant", "content": "\\n4."}  --mark-->  "\\n" MARK "4." MARK  --template-->  text with marks
        text with marks  --read-->  the text without them, and where each part begins and ends in it

    This reveals whether a template moves, cuts or omits a part. A part is marked inside its outer white space, which
    many templates trim. Messages other than the assistant's get one mark, a fence, which separates the text before them
    from the text after.
    """

    def __init__(self) -> None:
        self._meaning: list[tuple[int, Part, int]] = []  # (message, part, 0 start or 1 end) of each mark

    def mark(self, messages: Sequence[Plain]) -> list[Plain]:
        return [
            self._mark_parts(number, message) if message["role"] == "assistant" else self._fence(number, message)
            for number, message in enumerate(messages)
        ]

    def read(self, rendered: str) -> tuple[str, Marked]:
        """Return the text without marks, and their positions; the first one for a part that is written twice."""
        pieces: list[str] = []
        places: dict[tuple[int, Part, int], int] = {}
        length = last = 0
        for match in _MARKS.finditer(rendered):
            pieces.append(rendered[last : match.start()])
            length += match.start() - last
            last = match.end()
            places.setdefault(self._meaning[int(match[1])], length)
        marked = Marked()
        for (message, part, side), place in places.items():
            if part == _FENCE:
                marked.fences[message] = place
            elif side == 0 and (message, part, 1) in places:
                marked.parts.setdefault(message, {})[part] = place, places[message, part, 1]
        marked.fences = dict(sorted(marked.fences.items()))
        return "".join(pieces) + rendered[last:], marked

    def _new(self, message: int, part: Part, side: int) -> str:
        self._meaning.append((message, part, side))
        return f"{_SECRET}{len(self._meaning) - 1}{_SECRET}"

    def _around(self, number: int, part: Part, text: str) -> str:
        inner = text.strip()
        if not inner:
            return text
        at = len(text) - len(text.lstrip())
        return f"{text[:at]}{self._new(number, part, 0)}{inner}{self._new(number, part, 1)}{text[at + len(inner) :]}"

    def _mark_parts(self, number: int, message: Plain) -> Plain:
        marked: dict[str, Any] = {**message, "content": self._around(number, "content", message["content"])}
        if thought := message.get("reasoning_content"):
            marked["reasoning_content"] = self._around(number, "reasoning", thought)
            if "thinking" in message:
                marked["thinking"] = marked["reasoning_content"]
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [
                {**call, "function": {**call["function"], "name": self._around(number, n, call["function"]["name"])}}
                for n, call in enumerate(calls)
            ]
        return marked

    def _fence(self, number: int, message: Plain) -> Plain:
        content = message["content"]
        begin = max(0, len(content) - _SEARCHED)
        match = next(filter(None, (place.match(content, begin) for place in _PLACES)), None)
        if message["role"] == "system" or not match:
            return message
        return {**message, "content": content[: match.end()] + self._new(number, _FENCE, 0) + content[match.end() :]}
