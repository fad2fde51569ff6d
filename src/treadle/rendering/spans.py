"""What the tokens of a prompt are: the template's own, or what a message says.

    text of the prompt  --search, or marks-->  where each message's thought, content and calls stand in it
    that, the ids of its pieces, the spans of kept replies  -->  spans of the prompt

Spans are exact or absent: where the template alters a message, so that nothing tells where it stands, there are none.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from treadle.core.prefix import common_prefix
from treadle.core.types import Ids, Message, MessageSpan
from treadle.rendering.identity import reasoning
from treadle.rendering.marks import Marked, Part
from treadle.rendering.structure import Structure
from treadle.rendering.template import Plain

Spans = tuple[MessageSpan, ...]

_CLOSING_TAG = re.compile(r"\s*(</\w+>)?\s*")
_KINDS: Mapping[Part, str] = {"reasoning": "thought", "content": "text"}  # the others are tool calls


class TextPart(NamedTuple):
    """Says where a part of a message stands in a text. A call begins with its name, and ends where the next part or
    structural token begins."""

    start: int
    end: int
    role: str
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Holds text of a prompt that was encoded: where it begins, its pieces with their ids, and whose messages it has.

    A piece ends where a structural token begins.
    """

    start: int
    pieces: Sequence[tuple[str, Ids]]
    messages: range

    @property
    def ids(self) -> list[Ids]:
        """Return the ids of the pieces."""
        return [ids for _, ids in self.pieces]

    @property
    def end(self) -> int:
        """Return where the text ends."""
        return self.start + sum(len(text) for text, _ in self.pieces)


def _parts_by_search(text: str, encoded: Encoded, messages: Sequence[Plain]) -> list[TextPart] | None:
    """Find what the encoded text's messages say; None unless all of it stands there once, in order, unchanged.

    Where there is no text, messages are left out, or are part of what is kept.
    """
    found: list[TextPart] = []
    at, end = encoded.start, encoded.end
    if at == end:
        return found
    for number in encoded.messages:
        for kind, wanted in _said(messages[number]):
            start = text.find(wanted, at, end)
            if start < 0 or text.find(wanted, start + 1, end) >= 0:
                return None
            at = start + len(wanted)
            found.append(TextPart(start, end if kind == "call" else at, messages[number]["role"], kind))
    return found


def _said(message: Plain) -> Iterator[tuple[str, str]]:
    if thought := reasoning(message):
        yield "thought", thought
    if content := message["content"].strip():
        yield "text", content
    for call in message.get("tool_calls") or ():
        if name := call["function"]["name"].strip():
            yield "call", name


def _parts_by_marks(marked: Marked, encoded: Encoded, messages: Sequence[Plain]) -> list[TextPart]:
    """Return where marks found what the encoded text's messages say; what the template leaves out is not there."""
    found: list[TextPart] = []
    for number in encoded.messages:
        for part, (start, end) in marked.parts.get(number, {}).items():
            kind = _KINDS.get(part, "call")
            if encoded.start <= start < encoded.end:
                end = encoded.end if kind == "call" else end
                found.append(TextPart(start, end, messages[number]["role"], kind))
    return sorted(found)


def message_spans(
    text: str,
    messages: Sequence[Plain],
    runs: Sequence[Encoded | Spans | None],
    marked: Callable[[], Marked | None],
    structure: Structure,
) -> Spans | None:
    """Return the spans of a prompt that consists of these runs: encoded text and kept replies, by their spans.

    messages: as the template got them. marked: returns where the parts of all of them stand, if marks tell.
    None where a run is, or where nothing tells what its messages say.
    """
    if None in runs:
        return None
    encoded = [run for run in runs if isinstance(run, Encoded)]
    found = [_parts_by_search(text, run, messages) for run in encoded]
    if None in found:
        places = marked()
        if places is None:
            return None
        found = [_parts_by_marks(places, run, messages) for run in encoded]
    parts = dict(zip(map(id, encoded), found, strict=True))
    spans = _Joined()
    for run in runs:
        if isinstance(run, Encoded):
            spans.encoded(run, parts[id(run)] or [], structure)
        elif run is not None:
            spans.kept(run)
    return spans.done()


def concat(*parts: Spans | None) -> Spans | None:
    """Return the spans of tokens that consist of several parts, if all of them have spans."""
    spans = _Joined()
    for part in parts:
        if part is None:
            return None
        spans.kept(part)
    return spans.done()


def _tokens(text: str, ids: Ids, start: int, end: int, structure: Structure) -> tuple[int, int]:
    """Return which tokens of a piece text[start:end] is; those that stand across a boundary are among them."""
    first = _begins_with(ids, _ids(text[:start], structure)) if start else 0
    if end == len(text):
        return first, len(ids)
    after = _ids(text[end:], structure)
    return first, max(first, len(ids) - _begins_with(ids[::-1], after[::-1]))


def _ids(text: str, structure: Structure) -> Ids:
    pieces = structure.encode(text)
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _begins_with(ids: Ids, part: Ids) -> int:
    """Return how many ids of the part they begin with."""
    return len(part) if ids[: len(part)].tobytes() == part.tobytes() else common_prefix(part, ids)


class _Joined:
    """Puts spans together, run by run. Template text has the role of the message behind it."""

    def __init__(self) -> None:
        self._spans: list[MessageSpan] = []
        self._tokens = 0  # before the piece or reply at hand

    def encoded(self, run: Encoded, parts: Sequence[TextPart], structure: Structure) -> None:
        """Add text, of which the parts, in order, are what messages say."""
        start, left = run.start, list(parts)[::-1]
        for text, ids in run.pieces:
            end = start + len(text)
            while left and left[-1].start < end:
                part = left.pop()
                upto = min(part.end, end, left[-1].start if left else end)
                first, last = _tokens(text, ids, part.start - start, upto - start, structure)
                self.add(first, part.role, "template")
                self.add(last, part.role, part.kind)
            self._tokens += len(ids)
            start = end

    def kept(self, spans: Spans) -> None:
        """Add tokens that have these spans."""
        self.add(0, "assistant", "template")
        if not self._spans:
            self._spans += spans
        else:
            for span in spans:
                self.add(*span)
        self._tokens += spans[-1].end if spans else 0

    def add(self, end: int, role: str, kind: str) -> None:
        """Add what follows up to this token of the run, if it is any; to the last span, if it is of the same."""
        end += self._tokens
        if end <= (self._spans[-1].end if self._spans else 0):
            return
        if self._spans and self._spans[-1][1:] == (role, kind):
            self._spans.pop()
        self._spans.append(MessageSpan(end, role, kind))

    def done(self) -> Spans:
        self.add(0, "assistant", "template")
        return tuple(self._spans)


def cut(spans: Spans | None, start: int, end: int) -> Spans | None:
    """Return the spans of tokens [start, end), if there are spans."""
    if spans is None:
        return None
    first = bisect_right(spans, start, key=lambda span: span.end)
    last = bisect_left(spans, end, key=lambda span: span.end)
    inside = [span._replace(end=min(span.end, end) - start) for span in spans[first : last + 1]]
    return tuple(inside) if end > start else ()


def reply_spans(ids: Ids, reply: Message, structure: Structure) -> Spans:
    """Return the spans of a completion that was handed out as this message: thought, then content, then calls."""
    own = ids[:-1] if len(ids) and structure.is_structural(int(ids[-1])) else ids
    thought, calls = reasoning(reply), bool(reply.get("tool_calls"))
    spans = _Joined()
    if thought or calls:
        for end, kind in _places(structure.decode(own), thought, reply["content"].strip(), calls):
            spans.add(_tokens_upto(own, end, structure.decode), "assistant", kind)
    spans.add(len(own), "assistant", "text")
    spans.add(len(ids), "assistant", "template")
    return spans.done()


def _places(text: str, thought: str, content: str, calls: bool) -> Iterator[tuple[int, str]]:
    """Yield where thought, content and calls end in a completion."""
    at = max(0, text.find(thought) + len(thought)) if thought and thought in text else 0
    start = text.find(content, at) if content else -1
    if thought:
        tag = _CLOSING_TAG.match(text, at)
        yield (start if start >= 0 else tag.end() if tag and calls else len(text)), "thought"
    if start >= 0:
        yield start + len(content) if calls else len(text), "text"
    if calls:
        yield len(text), "call"


def _tokens_upto(ids: Ids, end: int, decode: Callable[[Ids], str]) -> int:
    """Return how many of the ids have a text of at least `end` characters."""
    return bisect_left(range(len(ids)), end, key=lambda count: len(decode(ids[:count])))
