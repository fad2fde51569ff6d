"""The prefix tree of some sequences, in the pieces that a page draws: each shared prefix once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from treadle.packing.flat import PackedCall
from treadle.packing.tree import PrefixTree, depth_first
from treadle.view.models import Segment


def prefix_segments(calls: Sequence[PackedCall]) -> tuple[list[Segment], list[int]]:
    """Return the segments in depth-first order, and of each call the segment in which it ends.

    For example, of `a b | c`, `a b c d | e` and `a x | y`: `a`, `b`, `c` (sampled by the first), `d`, `e`, `x`, `y`.
    """
    order, shared = depth_first(calls, [0] * len(calls))
    tree = PrefixTree.of([calls[i] for i in order], shared)
    path = np.zeros(max((len(c.token_ids) for c in calls), default=0), np.int64)  # depth -> node
    starts_at: set[int] = set()  # nodes at which a segment starts
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
    segments = [
        Segment(parent=parent, depth=int(tree.depth[start]), ids=tree.token_ids[start:stop].tolist())
        for start, stop, parent in zip(starts, [*starts[1:], size], parents, strict=False)
    ]
    last = [bisect_right(starts, end) - 1 for end in ends]
    for number, at in enumerate(last):
        while at >= 0:
            segments[at].steps.append(number)
            if segments[at].depth >= calls[number].prompt_length:
                segments[at].sampled.append(number)
            at = segments[at].parent
    return segments, last
