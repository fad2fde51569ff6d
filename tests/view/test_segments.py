"""The tree of segments holds every sequence, and each shared prefix once."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treadle.packing.flat import PackedCall
from treadle.packing.layout import Packing, Sharing, arrange
from treadle.view.models import Segment
from treadle.view.texts import prefix_segments


def calls_of(sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[PackedCall]:
    return [PackedCall(np.array([*prompt, *reply], np.int32), len(prompt), 0) for prompt, reply in sequences]


def walk(runs: Sequence[Segment], leaf: int) -> list[int]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = runs[leaf].parent
    return path[::-1]


def test_the_example() -> None:
    runs, ends = prefix_segments(calls_of([((1, 2), (3,)), ((1, 2, 3, 4), (5,)), ((1, 9), (8,))]))
    found = [(run.parent, run.depth, run.ids, run.steps, run.sampled) for run in runs]
    assert found == [
        (-1, 0, [1], [0, 1, 2], []),
        (0, 1, [2], [0, 1], []),
        (1, 2, [3], [0, 1], [0]),
        (2, 3, [4], [1], []),
        (3, 4, [5], [1], [1]),
        (0, 1, [9], [2], []),
        (5, 2, [8], [2], [2]),
    ]
    assert ends == [2, 4, 6]


_SEQUENCE = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=6), st.lists(st.integers(0, 2), min_size=1, max_size=4)
)


@given(st.lists(_SEQUENCE, max_size=8))
def test_every_sequence_is_in_the_tree_and_nothing_twice(sequences: list[tuple[list[int], list[int]]]) -> None:
    calls = calls_of(sequences)
    runs, ends = prefix_segments(calls)
    for number, ((prompt, reply), end) in enumerate(zip(sequences, ends, strict=True)):
        path = walk(runs, end)
        assert [int(i) for at in path for i in runs[at].ids] == [*prompt, *reply]
        assert all(number in runs[at].steps for at in path)
        sampled = [int(i) for at in path if number in runs[at].sampled for i in runs[at].ids]
        assert sampled == reply
        assert [runs[at].depth for at in path] == [sum(len(runs[p].ids) for p in path[:n]) for n in range(len(path))]
    assert sum(len(run.ids) for run in runs) == arrange(calls, Packing.TREE, Sharing.BATCH).nodes
    assert all(run.parent < at and len(run.ids) for at, run in enumerate(runs))
    children = [(run.parent, int(run.ids[0])) for run in runs]
    assert len(set(children)) == len(children)
