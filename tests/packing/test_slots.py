import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.tries import Readings, call, readings_of_chunk, readings_of_tree, some_calls
from treadle.packing.flat import PackedCall
from treadle.packing.layout import Packing, Slot, arrange, balance, chunks, micro_batches, slots
from treadle.packing.tree import PrefixTree

LENGTHS = st.lists(st.integers(1, 40), max_size=9)


def tree_of(length: int, first: int = 0) -> PrefixTree:
    return PrefixTree.of([call([1] * length, 1, first)], np.zeros(1, np.int64))


def dealt(lengths: list[int], ranks: int, budget: int) -> tuple[list[PrefixTree], list[Slot]]:
    trees = [tree_of(length) for length in lengths]
    return trees, slots(trees, ranks, lambda tree: len(chunks(tree, budget)))


@given(some_calls(), st.integers(1, 5), st.integers(1, 12))
def test_every_rank_makes_the_same_passes_and_every_pair_is_read_once(
    made: list[PackedCall], ranks: int, budget: int
) -> None:
    trees = micro_batches(arrange(made, Packing.TREE), budget)
    found = slots(trees, ranks, lambda tree: len(chunks(tree, budget)))
    read: Readings = {}
    for slot in found:
        assert len(slot.trees) == ranks
        for tree in slot.trees:
            parts = chunks(tree, budget, slot.passes)
            assert len(parts) == slot.passes
            for part in parts:
                assert len(part.token_ids)  # a pass needs a token
                read.update(readings_of_chunk(tree, part))
    own = [tree for slot in found for tree in slot.trees if len(tree)]
    assert sorted(map(id, own)) == sorted(map(id, trees))
    assert read == {flat: seen for tree in trees for flat, seen in readings_of_tree(tree).items()}


@given(some_calls(), st.integers(1, 12), st.integers(0, 3))
def test_padding_follows_the_trees_own_nodes_and_is_read_by_nobody(
    made: list[PackedCall], budget: int, more: int
) -> None:
    for tree in micro_batches(arrange(made, Packing.TREE), budget):
        own = chunks(tree, budget)
        padded = chunks(tree, budget, len(own) + more)
        assert [part.start for part in padded[: len(own)]] == [part.start for part in own]
        at = len(tree)
        for part in padded[len(own) :]:
            assert (part.start, len(part.token_ids), len(part.context), len(part.flat)) == (at, 1, 0, 0)
            at += 1


@given(LENGTHS, st.integers(1, 4), st.sampled_from([3, 10, 100]))
def test_padding_is_bounded_by_the_largest_tree(lengths: list[int], ranks: int, budget: int) -> None:
    trees, found = dealt(lengths, ranks, budget)
    needed = [len(chunks(tree, budget)) for tree in trees]
    padded = sum(ranks * slot.passes for slot in found) - sum(needed)
    assert padded == sum(slot.padded for slot in found) <= (ranks - 1) * max(needed, default=0)
    assert len(found) == -(-len(trees) // ranks)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(2, 3))
def test_no_other_way_to_deal_makes_fewer_passes(lengths: list[int], ranks: int) -> None:
    trees, found = dealt(lengths, ranks, 5)
    needed = [len(chunks(tree, 5)) for tree in trees]
    ways = ([order[at : at + ranks] for at in range(0, len(order), ranks)] for order in itertools.permutations(needed))
    assert sum(slot.passes for slot in found) == min(sum(map(max, way)) for way in ways)


@given(LENGTHS, st.sampled_from([3, 10, 100]))
def test_one_rank_computes_the_trees_as_they_come(lengths: list[int], budget: int) -> None:
    trees, found = dealt(lengths, 1, budget)
    assert [slot.trees for slot in found] == [(tree,) for tree in trees]
    assert not any(slot.padded for slot in found)
    assert balance(found) == pytest.approx(1)
