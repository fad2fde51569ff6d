"""Relation of each step to the earlier ones of its trajectory, as far as ids and text show, and the cost of breaks.

With each call, an agent that only appends sends all it sent and sampled before, plus new tokens. If it sends earlier
content in another form, existing tokens must be computed again: a break. For example, with `|` before sampled tokens:

    0  <s> rules <u> sum | par is <e>                   opens
    1  <s> rules <u> sum par is <e> <u> more | 4 <e>    extends 0
    2  <s> rules <u> help | 7 <e>                       fork of 1: shares 3 tokens, leaves all replies alone
    3  <s> rules <u> sum paris <e> <u> more 4 <e> <u> why | so <e>
                                                        break from 1 at token 4, tokenization, 7 tokens: `par is`
    4  <s> rules <u> more 4 <e> <u> why so <e> <u> ok | fine <e>
                                                        break from 3 at token 3, truncated, 9 tokens: `sum`, `paris`
    5  <s> rules <u> more five <e> <u> why so <e> <u> ok fine <e> <u> then | bye <e>
                                                        break from 4 at token 4, changed, 10 tokens: `4`

A sequence is a prompt and its completion; it is open until a step extends it. A step
  `opens`    if it is the first, or shares no token with any before it;
  `extends`  an open sequence if its prompt begins with all of it;
  is a `fork` of the sequence it shares most with (the newest of equals), if it leaves that sequence's replies alone;
  is a `break` of it, if it rewrites them: it departs from it within or right before a reply, or before a reply that it
             carries along, or it continues with the same text. A carried reply stands behind the departure as it did
             in the sequence, recognized by the tokens on both sides of its beginning or of its end: a prompt that
             merely quotes a reply is a fork.
The cause of a break is the one recorded with the step by its renderer, which knows the messages; a step with a recorded
cause is a break unless it extends. Without one, it follows from the first differing token:
  `tokenization`  both continue with the same text in different tokens, up to a common token boundary. Two texts
                  tokenized by BPE have no such boundary unless their tokens agree up to it, so an edit never matches.
  `truncated`     part of the sequence is left out: the prompt continues with later tokens of the sequence.
  `changed`       neither.
The price of a break, `extra_tokens`, counts the additional tokens that a prompt of that length would have shared if it
had kept the sequence: min(length of sequence, of prompt) - shared. Forks carry nothing along and cost nothing.

Ids alone cannot distinguish a conversation restarted from a summary from a sub-agent's: both are forks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np

from treadle.core.types import BreakCause, Ids, Step, common_prefix, seen_ids
from treadle.packing.flat import FlatBatch, Indices, PackedCall

Decode = Callable[[Ids], str]

_SHOWN = 5  # differing tokens kept per side
_CONTEXT = 4  # tokens decoded before a difference: a character may span four, and decoders drop a leading blank
_SAME_TEXT = 64  # differing tokens to compare as text
_RUN = 12  # matching tokens in a row that prove a truncation: more than a turn's header has
_SIDE = 4  # tokens on either side of a reply's beginning, or end, that identify it
_PIECE = "\ufffd"  # decoding of an unfinished character


class Kind(StrEnum):
    """Relation of a step to the earlier sequences of its trajectory."""

    OPENS = "opens"
    EXTENDS = "extends"
    FORK = "fork"
    BREAK = "break"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Some tokens: their ids and decoded text."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Relation:
    """Relation of one step to its trajectory's earlier sequences.

    base: step with the sequence (prompt and completion) it is compared with; None if it opens.
    shared: number of leading prompt tokens in common with that sequence.
    For breaks: the cause, the first differing tokens of the sequence (`was`) and of the prompt (`now`), from token
    `shared` on, and `extra_tokens`, the price in tokens.
    """

    kind: Kind
    base: int | None = None
    shared: int = 0
    cause: BreakCause | None = None
    was: Tokens | None = None
    now: Tokens | None = None
    extra_tokens: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """A sequence not extended so far. replies: (start, end) of all sampled parts leading to it."""

    ids: Ids
    replies: tuple[tuple[int, int], ...]

    def samples(self, at: int) -> bool:
        return any(start <= at < end for start, end in self.replies)

    def __len__(self) -> int:
        return len(self.ids)


def relations(
    calls: Sequence[PackedCall],
    decode: Decode,
    causes: Sequence[BreakCause | None] | None = None,
    played: Sequence[bool] | None = None,
) -> list[Relation]:
    """Return the relation of each call of one trajectory, in call order.

    decode: ids -> text, special tokens included. causes: recorded causes (`Step.break_cause`), if any.
    played: whether the episode used each call (default: all); later calls relate only to played ones.

    Costs one comparison per call while each extends the previous one, otherwise one per call and open sequence.
    """
    sequences: dict[int, _Sequence] = {}  # open ones, by their last step, oldest first
    made = []
    for number, (call, cause) in enumerate(zip(calls, causes or [None] * len(calls), strict=True)):
        relation = _relation(call.token_ids[: call.prompt_length], sequences, decode, cause)
        made.append(relation)
        if played is not None and not played[number]:
            continue
        extended = sequences.pop(relation.base) if relation.base is not None and relation.kind is Kind.EXTENDS else None
        replies = extended.replies if extended else ()
        sequences[number] = _Sequence(call.token_ids, (*replies, (call.prompt_length, len(call.token_ids))))
    return made


def _relation(prompt: Ids, sequences: dict[int, _Sequence], decode: Decode, recorded: BreakCause | None) -> Relation:
    shared: dict[int, int] = {}
    for step in reversed(sequences):
        shared[step] = common_prefix(prompt, sequences[step].ids)
        if shared[step] == len(sequences[step]) and len(shared) == 1:
            return Relation(Kind.EXTENDS, step, shared[step])  # the usual case: the step before
    if whole := [step for step in shared if shared[step] == len(sequences[step])]:
        base = max(whole, key=lambda step: (shared[step], step))
        return Relation(Kind.EXTENDS, base, shared[base])
    if not sequences:
        return Relation(Kind.OPENS)
    base = max(shared, key=lambda step: (shared[step], step))
    at = shared[base]
    if at == len(prompt):
        return Relation(Kind.FORK, base, at)
    rewritten = sequences[base].samples(at)
    if not rewritten and (carried := _carried(prompt[at:], sequences)) is not None:
        rewritten, base, at = True, carried, shared[carried]
    if recorded is not None:
        return _break(recorded, base, sequences[base].ids, prompt, at, decode)
    if _same_text(sequences[base].ids, prompt, at, decode):
        return _break(BreakCause.TOKENIZATION, base, sequences[base].ids, prompt, at, decode)
    if rewritten:
        left_out = _left_out(sequences[base].ids[at:], prompt[at:])
        cause = BreakCause.TRUNCATED if left_out else BreakCause.CHANGED
        return _break(cause, base, sequences[base].ids, prompt, at, decode)
    return Relation(Kind.FORK, base, at) if at else Relation(Kind.OPENS)


def _break(cause: BreakCause, base: int, was: Ids, now: Ids, at: int, decode: Decode) -> Relation:
    before, after = (Tokens(tuple(ids.tolist()), decode(ids)) for ids in (was[at : at + _SHOWN], now[at : at + _SHOWN]))
    return Relation(Kind.BREAK, base, at, cause, before, after, extra_tokens=min(len(was), len(now)) - at)


def _carried(rest: Ids, sequences: dict[int, _Sequence]) -> int | None:
    """Return the newest sequence with a reply that `rest` carries along; None if there is none."""
    held = rest.tobytes()
    for step in reversed(sequences):
        ids = sequences[step].ids
        for start, end in reversed(sequences[step].replies):
            if start == end:
                continue
            beginning = ids[max(start - _SIDE, 0) : min(start + _SIDE, end)]
            ending = ids[max(end - _SIDE, start) : end + _SIDE]
            if _occurs(beginning, held) or (end < len(ids) and _occurs(ending, held)):
                return step
    return None


def _occurs(part: Ids, whole: bytes) -> bool:
    """Return whether the ids occur contiguously in `whole`."""
    wanted = part.tobytes()
    at = whole.find(wanted)
    while at > 0 and at % part.itemsize:
        at = whole.find(wanted, at + 1)
    return at >= 0


def _same_text(was: Ids, now: Ids, at: int, decode: Decode) -> bool:
    """Return whether both continue with the same text up to a common boundary, or `was` or the comparison ends."""
    begin, old, new = max(at - _CONTEXT, 0), at + 1, at + 1
    while max(old, new) <= at + _SAME_TEXT:
        before, after = decode(was[begin:old]), decode(now[begin:new])
        if before == after and not before.endswith(_PIECE):
            return True
        before, after = before.rstrip(_PIECE), after.rstrip(_PIECE)
        if not before.startswith(after) and not after.startswith(before):
            return False
        if len(before) <= len(after):  # the shorter text goes on
            if old == len(was):
                return True
            old += 1
        else:
            if new == len(now):
                return False
            new += 1
    return True


def _left_out(was: Ids, now: Ids) -> bool:
    """Return whether `now`, which begins differently, begins with `_RUN` later tokens of `was`, or with its end."""
    if _occurs(now[:_RUN], was[1:].tobytes()):
        return True
    return any((was[-n:] == now[:n]).all() for n in range(1, min(_RUN, len(was), len(now) + 1)))


def parent_steps(batch: FlatBatch) -> Indices:
    """Return int64[K]: per played step, the step that called it, or itself on its trajectory's main branch."""
    parents = np.arange(len(batch.played))
    start = np.searchsorted(batch.trajectory_of_played, np.arange(len(batch.trajectories) + 1))
    for first, end in pairwise(start.tolist()):
        parents[first:end] = first + calling_steps(batch.played[first:end])
    return parents


def calling_steps(steps: Sequence[Step]) -> Indices:
    """Return int64[T]: the same for the T steps of one trajectory, in call order, inferred from ids alone."""
    calls = [PackedCall(ids, len(step.prompt_ids), 0) for step, ids in zip(steps, seen_ids(steps), strict=True)]
    return callers(relations(calls, _no_text, [step.break_cause for step in steps]))


def callers(related: Sequence[Relation]) -> Indices:
    """Return int64[T]: the caller of each of the T steps of one trajectory, given their relations.

    A step continues the conversation that it extends or breaks with; a fork, or a step that shares nothing, begins a
    new conversation. For example, an agent that asks a sub-agent twice, then restarts from a summary:

        step           0     1     2     3     4     5
        conversation   main  sub   sub   main  new   new
        called by      -     0     0     -     -     -

    If the earlier conversation continues later, the newer one is a sub-agent's and the earlier one is the main branch.
    A conversation that begins after the main branch has ended takes its place: a summary, or an agent whose prompt is
    not its history. So an agent that only appends, or never does, is one main branch in call order.
    """
    conversation = _conversations(related)
    last = {name: number for number, name in enumerate(conversation)}
    parents = np.arange(len(related))
    # The conversation, and the step, that the main branch has reached.
    main = latest = 0
    caller: dict[int, int] = {}  # sub-agents' conversations
    for number, name in enumerate(conversation):
        if name != main and name not in caller and last[main] > number:
            caller[name] = latest
        if name in caller:
            parents[number] = caller[name]
        else:
            main, latest = name, number
    return parents


def _conversations(related: Sequence[Relation]) -> list[int]:
    """Return for each step the first step of its conversation."""
    firsts: list[int] = []
    for number, relation in enumerate(related):
        base = None if relation.kind is Kind.FORK else relation.base
        firsts.append(number if base is None else firsts[base])
    return firsts


def _no_text(ids: Ids) -> str:
    """Return a text that differs wherever ids do, so that only recorded causes make tokenization breaks."""
    return str(ids.tolist())
