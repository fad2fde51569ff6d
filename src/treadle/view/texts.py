"""What a page shows of tokens: their texts, the messages they make up, their prefix tree, values of sampled ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from tokenizers import Tokenizer

from treadle.core.text import escape_text
from treadle.core.trainer import StepTrace
from treadle.core.types import Ids, Step
from treadle.packing.flat import PackedCall
from treadle.packing.tree import depth_first

Json = dict[str, Any]
_PIECE = "\ufffd"  # what an unfinished character decodes to
_MESSAGE = 2000  # characters
_LONGEST = 4  # bytes of a character


class Span(BaseModel):
    """Tokens [start, end) of a step with one role and kind: template, text, thought or call."""

    start: int
    end: int
    role: str
    kind: str


class Segment(BaseModel):
    """Consecutive tokens of the prefix tree without a fork, all read or all sampled.

    parent: index of the segment before it; -1 at a root. depth: tokens before it. steps: indices of those it is part
    of. sampled: of those that sampled it; the others read it. joined: (start, count, text) of tokens that are pieces of
    a character.
    """

    parent: int
    depth: int
    ids: list[int]
    steps: list[int] = []
    sampled: list[int] = []
    joined: list[tuple[int, int, str]] = []


class TokenTexts:
    """Texts of tokens as a page shows them: control characters and bidirectional marks as escapes."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, str] = {}
        self._anchor = list(tokenizer.encode("a", add_special_tokens=False).ids) if tokenizer else []
        self._before = len(self._decode(self._anchor)) if tokenizer else 0
        added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        self.special = {int(ident) for ident, token in added.items() if token.special}

    def of(self, ident: int) -> str:
        """Return the text of one token; of a piece of a character, what the vocabulary writes; without any, its id."""
        if ident not in self._cache:
            text = self.raw(ident)
            if not text or _PIECE in text:
                text = (self._tokenizer and self._tokenizer.id_to_token(ident)) or f"[{ident}]"
            self._cache[ident] = escape_text(_writable(text))
        return self._cache[ident]

    def raw(self, ident: int) -> str:
        if self._tokenizer is None:
            return ""
        if ident in self.special:
            return self._decode([ident])
        return self._decode([*self._anchor, ident])[self._before :]

    def all(self, ids: Iterable[int]) -> dict[int, str]:
        return {ident: self.of(ident) for ident in dict.fromkeys(ids)}

    def joined(self, ids: Sequence[int]) -> list[tuple[int, int, str]]:
        """Return (start, count, text) of runs of tokens that only together are text."""
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
        """Return the text of tokens in a row; without a tokenizer, their ids."""
        numbers = ids.tolist()
        return self._decode(numbers) if self._tokenizer else "".join(f"[{n}]" for n in numbers)

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def clipped(text: str, limit: int = _MESSAGE) -> str:
    """Return a message for a table, with escapes, and without its end if a tool has made it very long."""
    if len(text) <= limit:
        return escape_text(text)
    return f"{escape_text(text[:limit])} … ({len(text):,} characters)"


def _writable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


# Messages, recognized by the special tokens around them.

_ROLES = "system|user|assistant|tool|observation|developer"
_HEADERS = re.compile(
    r"<\|im_start\|>(\w*)\n?|<\|start_header_id\|>(\w*)<\|end_header_id\|>\n*|<start_of_turn>(\w*)\n?"
    rf"|<\|({_ROLES})\|>\n?"
)
_ENDS = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<\|eom_id\|>|<end_of_turn>|<\|end\|>|<\|endoftext\|>|</s>)\n?")
_FOLDED = re.compile(r"(?P<thought><think>.*?(?:</think>|\Z))|(?P<call><tool_call>.*?(?:</tool_call>|\Z))", re.DOTALL)


def message_spans(ids: Sequence[int], texts: TokenTexts, role: str = "") -> list[Span]:
    """Return the spans of some tokens, in order and without gaps. role: of the message that they go on with.

    A marker counts only as a special token: one that a model or a tool wrote as text does not begin a message. A blank
    before a message belongs to the one before, if there is any.
    """
    pieces = [texts.raw(ident) for ident in ids]
    starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces], dtype=np.int64)])
    text = "".join(pieces)
    is_mark = {int(starts[at]) for at, ident in enumerate(ids) if ident in texts.special}
    parts: list[tuple[int, str, str]] = []  # where each begins, its kind and role
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
    """Return the spans of a sequence whose first `shared` tokens are those of one with the spans `base`."""
    if shared and ids[shared - 1] in texts.special and not _ENDS.match(texts.raw(ids[shared - 1])):
        shared -= 1  # another role may follow the marker
    kept = [s.model_copy(update={"end": min(s.end, shared)}) for s in base if s.start < shared]
    role = kept[-1].role if kept else ""
    new = message_spans(ids[shared:], texts, role)
    return kept + [s.model_copy(update={"start": s.start + shared, "end": s.end + shared}) for s in new]


def prefix_segments(calls: Sequence[PackedCall]) -> tuple[list[Segment], list[int]]:
    """Return the segments in depth-first order, and for each call the segment in which it ends.

    For example, of `a b | c`, `a b c d | e` and `a x | y`: `a`, `b`, `c` (sampled by the first), `d`, `e`, `x`, `y`.
    """
    order, indices = depth_first(calls, [0] * len(calls))
    shared = indices.tolist()
    segments: list[Segment] = []
    last = [0] * len(calls)
    pending = [(0, len(order), 0, -1)]  # calls order[first:stop] agree in `depth` tokens, up to the end of `parent`
    while pending:
        first, stop, depth, parent = pending.pop()
        while first < stop and len(calls[order[first]].token_ids) == depth:
            last[order[first]] = parent
            first += 1
        forks = [at for at in range(first + 1, stop) if shared[at] == depth]
        if forks:
            parts = list(pairwise([first, *forks, stop]))
            pending += [(start, end, depth, parent) for start, end in reversed(parts)]
        elif first < stop:
            group = order[first:stop]
            ends = [e for n in group for e in (calls[n].prompt_length, len(calls[n].token_ids)) if e > depth]
            end = min(ends + shared[first + 1 : stop])
            sampled = sorted(n for n in group if calls[n].prompt_length <= depth)
            ids = calls[group[0]].token_ids[depth:end].tolist()
            segments.append(Segment(parent=parent, depth=depth, ids=ids, steps=sorted(group), sampled=sampled))
            pending.append((first, stop, end, len(segments) - 1))
    return segments, last


COLUMNS = (
    ("logprob", "log-prob, engine", "low", "log-probability in the distribution that it was sampled from"),
    ("learner_logprob", "log-prob, learner", "low", "log-probability by the learner, before the update"),
    ("ratio", "ratio", "around_one", "probability by the learner over the one that the loss compares with"),
    ("clipped", "clipped", "flag", "whether the loss bounded the ratio"),
    ("advantage", "advantage", "diverging", "weight of the token in the loss; none if masked"),
    ("mask", "mask", "flag", "whether the token may be trained"),
    ("version", "version", "steps", "of the policy that sampled the token"),
    ("entropy", "entropy", "high", "of the distribution that the token is drawn from, by the learner, in nats"),
    ("reward", "token reward", "diverging", "given for this very token"),
)
"""(name, label, scale, help) of all values of a sampled token. Traces are recorded for a share of the groups only.

scale: what stands out. low: small log-probabilities; high: large values; around_one: ratios far from 1; diverging: both
signs; steps: whole numbers apart; flag: yes.
"""


def step_columns(step: Step, advantage: float | None, trace: StepTrace | None) -> dict[str, list[Any]]:
    """Return name -> a value for each sampled token, for the recorded columns. advantage: the trajectory's mean."""
    mask = step.mask.tolist()
    columns: dict[str, list[Any]] = {
        "logprob": _rounded(step.logprobs),
        "mask": mask,
        "version": step.policy_versions.tolist(),
    }
    if trace is not None:
        columns["learner_logprob"] = _rounded(trace.logprobs)
        columns["entropy"] = _rounded(trace.entropy)
        columns["advantage"] = [a if m else None for a, m in zip(_rounded(trace.advantage), mask, strict=True)]
        if trace.ratio is not None:
            columns["ratio"] = _rounded(trace.ratio)
        if trace.clipped is not None:
            columns["clipped"] = trace.clipped.tolist()
    elif advantage is not None:
        columns["advantage"] = [advantage if m else None for m in mask]
    if step.given.tokens is not None:
        columns["reward"] = step.given.tokens.tolist()
    return columns


def columns_of(recorded: Iterable[str], split: str) -> list[Json]:
    """Return the columns to show, given the names of those that some step has.

    In training, a column that could have been recorded is shown as missing; few environments reward single tokens.
    """
    names = set(recorded)
    return [
        {"name": name, "label": label, "help": text, "scale": scale, "is_recorded": name in names}
        for name, label, scale, text in COLUMNS
        if name in names or (split == "train" and name != "reward")
    ]


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [round(value, 6) for value in values.tolist()]
