"""Segments: a micro-batch as runs of nodes without a branch, for layers that compute tokens sequentially.

    a b c | d e f        segments: abc, def and gh (which begin with the state after abc)
          | g h

A layer with a state (a recurrence, a convolution) starts each segment from the state at the end of its parent, so that
it computes every node of the tree once, as attention does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from treadle.packing.layout import MicroBatch

_CALL = 256  # cost of a layer's call, in nodes: shorter segments share a padded call


class Segment(NamedTuple):
    """Nodes [first, end) of a micro-batch.

    before: node of the tree with the initial state, None for the first nodes of a sequence. inside: whether that node
    is in the same micro-batch. last: number of its last node in the tree. ongoing: whether other segments begin with
    its final state, in this micro-batch or (kept) in later ones.
    """

    first: int
    end: int
    before: int | None
    inside: bool
    last: int
    ongoing: bool
    kept: bool

    @property
    def length(self) -> int:
        return self.end - self.first

    @property
    def leaves(self) -> bool:
        """Whether any segment begins with its final state."""
        return self.ongoing or self.kept


def segments(part: MicroBatch) -> list[Segment]:
    """Return the segments of a micro-batch, parents before children."""
    ends = np.flatnonzero(part.branches) + 1
    if not len(ends) or ends[-1] != len(part.branches):
        ends = np.append(ends, len(part.branches))
    bounds = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
    depth = part.position_ids
    above: list[int] = []  # last nodes of the segments from the root to the current one
    before: list[tuple[int | None, bool]] = []
    ongoing = set[int]()
    for first, end in bounds:
        while above and depth[above[-1]] >= depth[first]:
            above.pop()
        if above:
            ongoing.add(above[-1])
            before.append((part.start + above[-1], True))
        else:
            before.append((int(part.context[depth[first] - 1]) if depth[first] else None, False))
        above.append(end - 1)
    return [
        Segment(first, end, node, inside, part.start + end - 1, end - 1 in ongoing, bool(part.kept[end - 1]))
        for (first, end), (node, inside) in zip(bounds, before, strict=True)
    ]


class Together(NamedTuple):
    """Segments computed in one call.

    waiting: the input of their first node follows a waiting one. single: they are single nodes with a waiting input.
    """

    segments: list[Segment]
    waiting: bool
    single: bool


def together(of: Sequence[Segment], waiting: Collection[int] = ()) -> list[Together]:
    """Group segments into calls, parents before children.

    The state that a segment leaves is the one after its last node, so only a segment without descendants can be padded.
    A layer may compute single tokens differently, without gradient or with other results. So a single node that begins
    with a state passes on that state and its own input, which waits: it is recomputed before each of its successors.
    waiting: nodes outside with waiting inputs.
    """
    level: dict[int, int] = {}  # last node -> how many segments are above
    waits = set(waiting)
    groups: dict[tuple[int, bool, bool, bool, int], list[Segment]] = defaultdict(list)
    for segment in of:
        depth = level[segment.before] + 1 if segment.inside and segment.before is not None else 0
        level[segment.last] = depth
        behind = segment.before in waits
        single = segment.length == 1 and segment.before is not None and not behind
        if single:
            waits.add(segment.last)
        groups[depth, segment.before is None, behind, single, _exact(segment)].append(segment)
    return [
        Together(bucket, behind, single)
        for key in sorted(groups)
        for _, _, behind, single, _ in [key]
        for bucket in _buckets(groups[key])
    ]


def _exact(segment: Segment) -> int:
    """Return the length required of all segments in a call, 0 if shorter ones can be padded."""
    return segment.length if segment.leaves else 0


def _buckets(alike: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Group segments of similar length, as long as the padding costs less than another call."""
    bucket: list[Segment] = []
    padding = 0
    for segment in sorted(alike, key=lambda s: -s.length):
        if bucket and (padding := padding + bucket[0].length - segment.length) > _CALL:
            yield bucket
            bucket, padding = [], 0
        bucket.append(segment)
    yield bucket
