"""Packing: recorded steps -> sequences -> micro-batches. A matter of cost only.

    spans --pack(step | chain)--> PackedSequence* --micro_batches(budget)--> MicroBatch*

Shapes: T tokens of a sequence or micro-batch, P pairs (step, token) whose log-probability is wanted.

A pair's log-probability is read at the token before its target, wherever packing has put it. So each pair carries the
position of its target and its index in the flat arrays, and nothing about the layout leaks out of here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from treadle.core.errors import DataError
from treadle.core.types import Ids
from treadle.packing.flat import Indices, Span


class Packing(StrEnum):
    """How steps share tokens in the forward pass."""

    STEP = "step"  # every step is a sequence of its own
    CHAIN = "chain"  # a step whose prompt begins with an earlier step's tokens continues its sequence


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequence:
    """Tokens computed once, in order. token_ids int32[T]; target, flat int64[P]: a pair's position here and in the
    flat arrays."""

    token_ids: Ids
    target: Indices
    flat: Indices


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Sequences laid end to end for one forward pass.

    token_ids int32[T], position_ids int64[T] (depth within the own sequence), lengths int64[sequences].
    source int64[P]: where to read a pair's distribution; target_ids int32[P]: the token it is asked for;
    flat int64[P]: its index in the flat arrays.
    """

    token_ids: Ids
    position_ids: Indices
    lengths: Indices
    source: Indices
    target_ids: Ids
    flat: Indices


def pack(calls: Sequence[Span], packing: Packing) -> list[PackedSequence]:
    """Lay out calls as sequences. Calls without completion tokens take no room.

    Raises DataError for a call with an empty prompt, whose first token nothing precedes.
    """
    open_chains: dict[int, list[list[Span]]] = {}
    finished: list[list[Span]] = []
    for call in calls:
        if not len(call.prompt_ids):
            raise DataError(f"a call of owner {call.owner} has an empty prompt")
        if not len(call.completion_ids):
            continue
        chains = open_chains.setdefault(call.owner, [])
        extended = (
            next((c for c in reversed(chains) if _extends(c[-1], call)), None) if packing is Packing.CHAIN else None
        )
        if extended is None:
            chains.append([call])
            finished.append(chains[-1])
        else:
            extended.append(call)
    return [_sequence(chain) for chain in finished]


def _extends(earlier: Span, call: Span) -> bool:
    cut, end = len(earlier.prompt_ids), len(earlier.prompt_ids) + len(earlier.completion_ids)
    return (
        len(call.prompt_ids) >= end
        and np.array_equal(call.prompt_ids[cut:end], earlier.completion_ids)
        and np.array_equal(call.prompt_ids[:cut], earlier.prompt_ids)
    )


def _sequence(chain: list[Span]) -> PackedSequence:
    last = chain[-1]
    return PackedSequence(
        token_ids=np.concatenate([last.prompt_ids, last.completion_ids]),
        target=np.concatenate([len(c.prompt_ids) + np.arange(len(c.completion_ids)) for c in chain]),
        flat=np.concatenate([c.first + np.arange(len(c.completion_ids)) for c in chain]),
    )


def micro_batches(sequences: Sequence[PackedSequence], max_tokens: int) -> list[MicroBatch]:
    """Cut sequences, longest first, into micro-batches of at most `max_tokens` tokens.

    A sequence longer than that gets a micro-batch of its own. Sorting by length keeps attention's padding small.
    """
    parts: list[list[PackedSequence]] = []
    used = 0
    for sequence in sorted(sequences, key=lambda s: -len(s.token_ids)):
        if parts and used + len(sequence.token_ids) <= max_tokens:
            parts[-1].append(sequence)
            used += len(sequence.token_ids)
        else:
            parts.append([sequence])
            used = len(sequence.token_ids)
    return [_micro_batch(part) for part in parts]


def _micro_batch(part: list[PackedSequence]) -> MicroBatch:
    lengths = np.array([len(s.token_ids) for s in part], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    target = np.concatenate([s.target + offset for s, offset in zip(part, offsets, strict=True)])
    token_ids = np.concatenate([s.token_ids for s in part])
    return MicroBatch(
        token_ids=token_ids,
        position_ids=np.concatenate([np.arange(n) for n in lengths]),
        lengths=lengths,
        source=target - 1,
        target_ids=token_ids[target],
        flat=np.concatenate([s.flat for s in part]),
    )
