"""Texts of tokens, and the messages they form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel

from treadle.core.images import OWN, PLACE, ImageIds
from treadle.core.text import escape_text
from treadle.core.types import Ids, Message, Step
from treadle.rendering.grammars import Grammars

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PIECE = "\ufffd"  # decoding of an unfinished character
_LONGEST = 4  # bytes of a character


class Span(BaseModel):
    """Tokens [start, end) of a step with one role and kind: template, text, thought or call."""

    start: int
    end: int
    role: str
    kind: str


class TokenTexts:
    """Texts of tokens for display: control characters and bidirectional marks as escapes.

    images: ids of placeholders in calls (`call`); the first one of an image reads as `PLACE`, the others as nothing.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self.images = tokenizer, ImageIds()
        self.grammars = Grammars(tokenizer) if tokenizer else None
        self._cache: dict[int, str] = {}
        self._anchor = list(tokenizer.encode("a", add_special_tokens=False).ids) if tokenizer else []
        self._before = len(self._decode(self._anchor)) if tokenizer else 0
        added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        self.special = {int(ident) for ident, token in added.items() if token.special}

    def of(self, ident: int) -> str:
        """Return `piece`, escaped."""
        if ident not in self._cache:
            self._cache[ident] = escape_text(_writable(self.piece(ident)))
        return self._cache[ident]

    def piece(self, ident: int) -> str:
        """Return the text of one token; for part of a character, its vocabulary entry; without one, its id."""
        text = self.raw(ident)
        if ident < OWN and (not text or _PIECE in text):
            return (self._tokenizer and self._tokenizer.id_to_token(ident)) or f"[{ident}]"
        return text

    def raw(self, ident: int) -> str:
        if ident >= OWN:
            return self._decode([ident])
        if self._tokenizer is None:
            return ""
        return self._decode([ident]) if ident in self.special else self.text([ident])

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens that may follow others."""
        return self._decode([*self._anchor, *ids])[self._before :]

    def all(self, ids: Iterable[int]) -> dict[int, str]:
        return {ident: self.of(ident) for ident in dict.fromkeys(ids)}

    def joined(self, ids: Sequence[int]) -> list[tuple[int, int, str]]:
        """Return (start, count, text) of runs of tokens that only together decode to text."""
        joined = []
        at = 0
        while at < len(ids):
            count = 1
            if self._tokenizer is not None and _PIECE in self.raw(ids[at]):
                for length in range(2, min(_LONGEST, len(ids) - at) + 1):
                    text = self._decode(ids[at : at + length])
                    if _PIECE not in text:
                        joined.append((at, length, escape_text(_writable(text))))
                        count = length
                        break
            at += count
        return joined

    def decode(self, ids: Ids) -> str:
        """Return the text of consecutive tokens; without a tokenizer, their ids."""
        return self._decode(ids.tolist())

    def call(self, step: Step) -> tuple[Ids, int]:
        """Return the ids of a step, int32[P + C], with those of `images`, and P, the number of prompt ids."""
        prompt = self.images.put(step.prompt_ids, step.images)
        return np.concatenate([prompt, step.completion_ids]), len(prompt)

    def _decode(self, ids: Sequence[int]) -> str:
        if max(ids, default=0) >= OWN:
            runs = groupby(ids, key=lambda ident: ident >= OWN)
            return "".join(self._pictures(run) if own else self._decode([*run]) for own, run in runs)
        if self._tokenizer is None:
            return "".join(f"[{ident}]" for ident in ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _pictures(self, ids: Iterable[int]) -> str:
        return PLACE * sum(self.images.image(ident)[1] == 0 for ident in ids)


def _writable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


class MessageTexts(TokenTexts):
    """Conversations recorded as text, in pieces that stand in for tokens on display.

    A piece is a whole thought, content or tool call of a message, or the text before or after a message.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def raw(self, ident: int) -> str:
        return self._pieces[ident]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(map(self.raw, ids))

    def decode(self, ids: Ids) -> str:
        return self.text(ids.tolist())

    def call(self, step: Step) -> tuple[Ids, int]:
        """Return the pieces of a step's conversation with its reply, and the number of pieces before the reply."""
        if step.chat is None:
            return super().call(step)
        before = [piece for message in step.chat.messages for piece in (*self._begun(message), self._mark(_END))]
        opening, *reply = self._begun(step.chat.reply)
        return np.array([*before, opening, *reply], np.int32), len(before) + 1

    def _begun(self, message: Message) -> list[int]:
        thought = message.get("reasoning_content")
        parts = [f"<think>{thought}</think>"] if thought else []
        parts += [message["content"]] if message["content"] else []
        for call in message.get("tool_calls", ()):
            parts.append(f"<tool_call>{call['function']['name']} {call['function']['arguments']}</tool_call>")
        opening = self._mark(f"<|im_start|>{message['role']}\n")
        return [opening, *map(self._id, parts)]

    def _mark(self, text: str) -> int:
        self.special.add(ident := self._id(text))
        return ident

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


_END = "<|im_end|>\n"


# Messages, recognized by the special tokens around them.

_ROLES = "system|user|assistant|tool|observation|developer"
_HEADERS = re.compile(
    r"<\|im_start\|>(\w*)\n?|<\|start_header_id\|>(\w*)<\|end_header_id\|>\n*|<start_of_turn>(\w*)\n?"
    rf"|<\|({_ROLES})\|>\n?"
)
_ENDS = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<end_of_turn>|<\|end\|>|<\|endoftext\|>|</s>)\n?")
_FOLDED = re.compile(r"(?P<thought><think>.*?(?:</think>|\Z))|(?P<call><tool_call>.*?(?:</tool_call>|\Z))", re.DOTALL)


def message_spans(ids: Sequence[int], texts: TokenTexts, role: str = "") -> list[Span]:
    """Return the spans of some tokens, in order and without gaps. role: role of the message they continue.

    A marker counts only as a special token: written as text by a model or a tool, it does not begin a message. A blank
    before a message belongs to the previous one, if any.
    """
    pieces = [texts.raw(ident) for ident in ids]
    starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces], dtype=np.int64)])
    text = "".join(pieces)
    is_mark = {int(starts[at]) for at, ident in enumerate(ids) if ident in texts.special}
    parts: list[tuple[int, str, str]] = []  # start, kind and role of each
    at = 0
    for mark in sorted((*_HEADERS.finditer(text), *_ENDS.finditer(text)), key=lambda mark: mark.start()):
        if mark.start() not in is_mark:
            continue
        opened = next((name for name in mark.groups() if name), "") if mark.re is _HEADERS else role
        if text[at : mark.start()].strip():
            parts += [(begin, kind, role) for begin, kind in _folded(text, at, mark.start())]
            at = mark.start()
        elif role and at < mark.start():
            parts.append((at, "template", role))
            at = mark.start()
        parts.append((at, "template", opened))
        role, at = opened, mark.end()
    parts += [(begin, kind, role) for begin, kind in _folded(text, at, len(text))]
    parts = parts or [(0, "text", role)]  # ids without a text
    part_of = np.searchsorted([begin for begin, _, _ in parts], starts[:-1], side="right") - 1
    labels = [
        ("template" if ident in texts.special else parts[part][1], parts[part][2])
        for ident, part in zip(ids, part_of.tolist(), strict=True)
    ]
    spans: list[Span] = []
    for (kind, role), members in groupby(range(len(ids)), key=labels.__getitem__):
        start, *rest = members
        spans.append(Span(start=start, end=start + len(rest) + 1, role=role, kind=kind))
    return spans


def _folded(text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
    for match in _FOLDED.finditer(text, start, end):
        if match.start() > start:
            yield start, "text"
        yield match.start(), str(match.lastgroup)
        start = match.end()
    if start < end:
        yield start, "text"


def extended_spans(base: Sequence[Span], shared: int, ids: Sequence[int], texts: TokenTexts) -> list[Span]:
    """Return the spans of a sequence that has its first `shared` tokens in common with one with the spans `base`."""
    if shared and ids[shared - 1] in texts.special and not _ENDS.match(texts.raw(ids[shared - 1])):
        # The marker may introduce another role.
        shared -= 1
    kept = [s.model_copy(update={"end": min(s.end, shared)}) for s in base if s.start < shared]
    role = kept[-1].role if kept else ""
    new = message_spans(ids[shared:], texts, role)
    return kept + [s.model_copy(update={"start": s.start + shared, "end": s.end + shared}) for s in new]


_MODEL_ROLES, _TOOL_ROLES = ("model",), ("ipython", "observation")


def messages_of(ids: Sequence[int], texts: TokenTexts) -> list[Message]:
    """Return the messages in some ids, as far as special tokens show them; tool calls are part of the text.

    If no token shows a role, everything is one user message.
    """
    messages: list[Message] = []
    for span in message_spans(ids, texts):
        text = texts.text(ids[span.start : span.end])
        if span.kind == "template":
            if _HEADERS.search(text):
                role = "assistant" if span.role in _MODEL_ROLES else "tool" if span.role in _TOOL_ROLES else span.role
                messages.append(Message(role=role or "user", content=""))
            continue
        if not messages:
            messages.append(Message(role="user", content=""))
        if span.kind == "thought":
            thought = text.removeprefix("<think>").removesuffix("</think>").strip()
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + thought
        else:
            messages[-1]["content"] += text
            pictures = [texts.images.image(ident) for ident in ids[span.start : span.end] if ident >= OWN]
            if urls := [image.url for image, number in pictures if number == 0]:
                messages[-1]["images"] = messages[-1].get("images", []) + urls
    return messages
