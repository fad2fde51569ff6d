"""Marks: secret texts around the parts of messages, by which they are found in the rendered text.

    {"role": "assistant", "content": "\\n4."}  --mark_parts-->  "\\n" MARK "4." MARK  --template-->  text with marks
    text with marks  --read-->  the text without them, and where each part begins and ends in it

A template that writes a part elsewhere, cut, or not at all is thereby seen to do so. A part is marked inside its outer
white space, which many templates trim. Messages that are not the assistant's get one mark somewhere inside, a fence:
it tells what stands before them from what stands behind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.rendering.structure import secret_text
from treadle.rendering.template import Plain

Part = int | str
"""`"content"`, `"reasoning"`, or the number of a tool call."""

_FENCE = "fence"
_SECRET = secret_text()
_MARKS = re.compile(f"{_SECRET}([0-9]+){_SECRET}")
# Where a fence may stand: inside a word, else behind a character; not in a tag, which templates look for.
_PLACES = (re.compile(r"(?s).*\w(?=\w)(?!\w*>)"), re.compile(r"(?s).*[^\s<>](?!\w*>)"))
_LOOKED_AT = 400  # characters at the end of a content in which a place for a fence is looked for


@dataclass(slots=True)
class Marked:
    """Where the parts of messages stand in a text.

    parts: message number -> part -> (start, end). fences: message number -> place, in order of messages.
    """

    parts: dict[int, dict[Part, tuple[int, int]]] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)


class Marks:
    """Sets marks in one conversation, and reads them: each stands for a message and a part of it."""

    def __init__(self) -> None:
        self._meaning: list[tuple[int, Part, int]] = []  # (message, part, 0 start or 1 end) of each mark

    def mark(self, messages: Sequence[Plain]) -> list[Plain]:
        return [
            self._mark_parts(number, message) if message["role"] == "assistant" else self._fence(number, message)
            for number, message in enumerate(messages)
        ]

    def read(self, rendered: str) -> tuple[str, Marked]:
        """Return the text without marks, and where they stood in it; of a part that comes out twice, the first."""
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
        begin = max(0, len(content) - _LOOKED_AT)
        match = next(filter(None, (place.match(content, begin) for place in _PLACES)), None)
        if message["role"] == "system" or not match:
            return message
        return {**message, "content": content[: match.end()] + self._new(number, _FENCE, 0) + content[match.end() :]}
