"""A prefix tree is the set of distinct prefixes, whatever the calls and their order."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.tries import (
    agreement,
    call,
    calls_of,
    nodes,
    parents_of_pairs,
    readings,
    readings_of_tree,
    seen,
    some_calls,
    words,
)
from treadle.packing.flat import PackedCall
from treadle.packing.tree import PrefixTree, depth_first

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def owners(calls: Sequence[PackedCall]) -> list[int]:
    return [c.trajectory for c in calls]


def tree_of(calls: Sequence[PackedCall], roots: Sequence[int] | None = None) -> PrefixTree:
    order, shared = depth_first(calls, owners(calls) if roots is None else roots)
    return PrefixTree.of([calls[i] for i in order], shared)


# depth_first


@given(some_calls(keyed=True))
def test_depth_first_shares_with_the_predecessor_all_that_is_shared_with_any_before(calls: list[PackedCall]) -> None:
    order, shared = depth_first(calls, owners(calls))
    assert sorted(order) == list(range(len(calls)))
    for at, this in enumerate(order):
        common = [agreement(words(calls[before]), words(calls[this])) for before in order[:at]]
        within = [
            c if calls[before].trajectory == calls[this].trajectory else 0
            for c, before in zip(common, order[:at], strict=True)
        ]
        assert shared[at] == max(within, default=0) == (within[-1] if within else 0)


# PrefixTree.of


@given(some_calls(keyed=True))
def test_nodes_are_the_distinct_prefixes(calls: list[PackedCall]) -> None:
    """Of a root, and with keys where there are any; `depth` counts the tokens before."""
    tree = tree_of(calls)
    found = [tuple(tree.token_ids[seen(tree.subtree_end, i)].tolist()) for i in range(len(tree))]
    assert Counter(found) == Counter(tuple(token for token, _ in prefix) for _, prefix in nodes(calls, owners(calls)))
    assert tree.depth.tolist() == [len(prefix) - 1 for prefix in found]


@given(some_calls(keyed=True))
def test_subtree_end_is_the_relation_of_ancestors(calls: list[PackedCall]) -> None:
    tree = tree_of(calls)
    for i in range(len(tree)):
        above = seen(tree.subtree_end, i)
        assert above[-1] == i
        assert tree.depth[above].tolist() == list(range(len(above)))
        for j in above:
            assert seen(tree.subtree_end, j) == above[: tree.depth[j] + 1]


@given(some_calls(keyed=True))
def test_each_pair_is_read_once_after_exactly_the_tokens_before_it(calls: list[PackedCall]) -> None:
    assert readings_of_tree(tree_of(calls)) == readings(calls)


@given(some_calls(keyed=True))
def test_pairs_are_read_at_one_node_exactly_if_root_ids_and_keys_before_them_agree(calls: list[PackedCall]) -> None:
    tree = tree_of(calls)
    parents = parents_of_pairs(calls, owners(calls))
    node_of = {(int(node), parents[int(flat)]) for node, flat in zip(tree.source, tree.flat, strict=True)}
    assert len(node_of) == len({node for node, _ in node_of}) == len({parent for _, parent in node_of})
    # and all of what they see is shared as far as it agrees
    path_of = {parent: seen(tree.subtree_end, node) for node, parent in node_of}
    for (root, a), path in path_of.items():
        for (other, b), way in path_of.items():
            assert agreement(path, way) == (agreement(a, b) if root == other else 0)


@given(some_calls(keyed=True), st.data())
def test_the_order_of_the_calls_does_not_matter(calls: list[PackedCall], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(calls))
    assert len(tree_of(shuffled)) == len(tree_of(calls))
    assert readings_of_tree(tree_of(shuffled)) == readings_of_tree(tree_of(calls))


@given(some_calls(keyed=True), st.integers(0, 7), st.integers(0, 7))
def test_neighbours_alone_have_a_tree_of_their_own(calls: list[PackedCall], start: int, size: int) -> None:
    """What the first call shares with one before it that is not there does not count."""
    order, shared = depth_first(calls, owners(calls))
    part = [calls[i] for i in order[start : start + size]]
    tree = PrefixTree.of(part, shared[start : start + size])
    assert len(tree) == len(nodes(part, owners(part)))
    assert readings_of_tree(tree) == readings(part)


def test_a_deep_tree_of_nested_calls() -> None:
    """2,000 turns, each one token longer than the one before, and a call that leaves each of them."""
    ids = list(range(2001))
    nested = [call(ids[: n + 1], n, n) for n in range(1, 2001)]
    leaving = [call([*ids[:n], -1], n, 3000 + n) for n in range(1, 2001)]
    tree = tree_of(nested + leaving)
    assert len(tree) == 4001
    assert sorted(tree.depth.tolist()) == sorted([*range(2001), *range(1, 2001)])
    ends = dict(zip(tree.flat.tolist(), tree.source.tolist(), strict=True))
    for n in range(1, 2001):
        assert ends[n] == ends[3000 + n]
        assert tree.token_ids[ends[n]] == tree.depth[ends[n]] == n - 1
    last = ends[2000]
    assert ((np.arange(len(tree)) <= last) & (last < tree.subtree_end)).sum() == 2000


@pytest.mark.parametrize("calls", [[], calls_of(([1], [2])), calls_of(([1], []))])
def test_trees_have_arrays_of_the_right_types(calls: list[PackedCall]) -> None:
    tree = tree_of(calls)
    fields = (tree.token_ids, tree.depth, tree.subtree_end, tree.source, tree.target_ids, tree.flat)
    assert [array.dtype for array in fields] == ["int32", "int64", "int64", "int64", "int32", "int64"]
    assert len(tree) == len(nodes(calls, owners(calls)))
