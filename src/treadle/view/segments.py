"""The prefix tree of some sequences, in the pieces that a page draws: each shared prefix once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treadle.core.types import Ids
from treadle.packing.flat import PackedCall
from treadle.packing.tree import PrefixTree, depth_first


@dataclass(slots=True)
class Run:
    """Consecutive tokens without a fork, all read or all sampled by the sequences that pass through.

    parent: index of the run before it, -1 at a root. depth: tokens before it. calls: indices of the sequences through
    it; sampled: of those that sampled it.
    """

    parent: int
    depth: int
    ids: Ids
    calls: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)


def prefix_runs(calls: Sequence[PackedCall]) -> tuple[list[Run], list[int]]:
    """Return the runs in depth-first order, and of each call the run in which it ends.

    For example, of `a b | c`, `a b c d | e` and `a x | y`: `a`, `b`, `c` (sampled by the first), `d`, `e`, `x`, `y`.
    """
    order, shared = depth_first(calls, [0] * len(calls))
    tree = PrefixTree.of([calls[i] for i in order], shared)
    path = np.zeros(max((len(c.token_ids) for c in calls), default=0), np.int64)  # depth -> node
    starts_at: set[int] = set()  # nodes at which a run starts
    branches: dict[int, int] = {}  # node -> the node before it, where that is not its number less one
    ends = [0] * len(calls)
    size = bottom = 0
    for number, common in zip(order, [0, *shared[1:].tolist()], strict=False):
        length, prompt = len(calls[number].token_ids), calls[number].prompt_length
        if common < bottom:
            starts_at.add(int(path[common]))
        if common < length:
            branches[size] = int(path[common - 1]) if common else -1
            starts_at.add(size)
        path[common:length] = np.arange(size, size + length - common)
        size, bottom = size + length - common, length
        if prompt < length:
            starts_at.add(int(path[prompt]))
        ends[number] = int(path[length - 1])
    starts = sorted(starts_at)
    parents = [bisect_right(starts, branches.get(start, start - 1)) - 1 for start in starts]
    runs = [
        Run(parent, int(tree.depth[start]), tree.token_ids[start:stop])
        for start, stop, parent in zip(starts, [*starts[1:], size], parents, strict=False)
    ]
    last = [bisect_right(starts, end) - 1 for end in ends]
    for number, at in enumerate(last):
        while at >= 0:
            runs[at].calls.append(number)
            if runs[at].depth >= calls[number].prompt_length:
                runs[at].sampled.append(number)
            at = runs[at].parent
    return runs, last
