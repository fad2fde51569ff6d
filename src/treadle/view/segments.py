"""The prefix tree of some sequences, in the pieces that a page draws: each shared prefix once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from treadle.packing.flat import PackedCall
from treadle.packing.tree import depth_first
from treadle.view.models import Segment


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
