"""Packing loses nothing, invents nothing, shares exactly what may be shared, and cuts where it costs least."""

import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import ragged_groups
from tests.packing.tries import (
    Readings,
    call,
    nodes,
    readings,
    readings_of_chunk,
    readings_of_tree,
    seen,
    some_calls,
    trained,
    words,
)
from treadle.core.errors import DataError
from treadle.core.types import Group
from treadle.packing.flat import PackedCall, calls, flatten
from treadle.packing.layout import (
    Arrangement,
    Packing,
    Sharing,
    Slot,
    arrange,
    balance,
    chunks,
    lay_out,
    micro_batches,
    slots,
)
from treadle.packing.tree import PrefixTree

EVERY = st.sampled_from(list(Packing))
ANY_SHARING = st.sampled_from(list(Sharing))
BUDGETS = st.integers(1, 40)


def owners(calls: Sequence[PackedCall], sharing: Sharing) -> list[int]:
    match sharing:
        case Sharing.TRAJECTORY:
            return [c.trajectory for c in calls]
        case Sharing.GROUP:
            return [c.group for c in calls]
        case Sharing.BATCH:
            return [0] * len(calls)


def lengths(calls: Sequence[PackedCall]) -> list[int]:
    return [len(c.token_ids) for c in calls]


def flats(arranged: Arrangement) -> list[int]:
    return [c.first for c in arranged.calls]


# arrange


@given(some_calls(keyed=True), EVERY, ANY_SHARING)
def test_an_arrangement_is_the_calls_with_completions_each_sharing_what_agrees(
    made: list[PackedCall], packing: Packing, sharing: Sharing
) -> None:
    arranged = arrange(made, packing, sharing)
    assert sorted(map(id, arranged.calls)) == sorted(map(id, trained(made)))
    assert arranged.lengths.tolist() == lengths(arranged.calls)
    assert arranged.shared[:1].sum() == 0
    assert arranged.lengths.dtype == arranged.shared.dtype == "int64"
    for (before, this), shared in zip(pairwise(arranged.calls), arranged.shared.tolist()[1:], strict=True):
        assert words(before)[:shared] == words(this)[:shared]
        assert 0 <= shared <= min(lengths([before, this]))
        assert not shared or len(set(owners([before, this], sharing))) == 1 or packing is Packing.CHAIN


@given(some_calls(keyed=True), EVERY, st.data())
def test_the_order_of_the_calls_changes_neither_cost_nor_what_is_read(
    made: list[PackedCall], packing: Packing, data: st.DataObject
) -> None:
    one, other = arrange(made, packing), arrange(data.draw(st.permutations(made)), packing)
    assert one.nodes == other.nodes
    trees = [tree for arranged in (one, other) for tree in micro_batches(arranged, 1000)]
    assert [readings_of_tree(tree) for tree in trees] == [readings(made)] * len(trees)


@given(some_calls(keyed=True), ANY_SHARING)
def test_a_tree_computes_every_distinct_prefix_once_per_owner(made: list[PackedCall], sharing: Sharing) -> None:
    assert arrange(made, Packing.TREE, sharing).nodes == len(nodes(trained(made), owners(trained(made), sharing)))


@given(some_calls(keyed=True), ANY_SHARING)
def test_step_shares_nothing_and_keeps_the_order(made: list[PackedCall], sharing: Sharing) -> None:
    arranged = arrange(made, Packing.STEP, sharing)
    assert flats(arranged) == [c.first for c in trained(made)]
    assert arranged.nodes == sum(lengths(trained(made)))


def continues(earlier: PackedCall, later: PackedCall) -> bool:
    """Whether the later call's prompt begins with all of the earlier one."""
    end = len(earlier.token_ids)
    same = earlier.trajectory == later.trajectory and words(earlier) == words(later)[:end]
    return same and end <= later.prompt_length


def most_saved(made: Sequence[PackedCall], at: int = 0, continued: frozenset[int] = frozenset()) -> int:
    """By trying all ways to continue each call at most once."""
    if at == len(made):
        return 0
    ways = [i for i in range(len(made)) if i not in continued and continues(made[i], made[at])]
    return max(
        most_saved(made, at + 1, continued),
        *(len(made[i].token_ids) + most_saved(made, at + 1, continued | {i}) for i in ways),
        0,
    )


@given(some_calls(max_calls=6, keyed=True), ANY_SHARING)
def test_chain_saves_the_most_that_continuing_each_call_at_most_once_can(
    made: list[PackedCall], sharing: Sharing
) -> None:
    """Sharing is for trees: chains stay within their trajectory."""
    arranged = arrange(made, Packing.CHAIN, sharing)
    assert arranged.nodes == sum(lengths(trained(made))) - most_saved(trained(made))
    for (before, this), shared in zip(pairwise(arranged.calls), arranged.shared.tolist()[1:], strict=True):
        assert shared in (0, len(before.token_ids))
        assert not shared or continues(before, this)


@settings(max_examples=30)
@given(ragged_groups(vocabulary=2))
def test_chain_computes_no_less_than_the_tree_and_no_more_than_merging_consecutive_steps(groups: list[Group]) -> None:
    made = trained(calls(flatten(groups)))
    merged = sum(len(before.token_ids) for before, this in pairwise(made) if continues(before, this))
    tree = arrange(made, Packing.TREE, Sharing.TRAJECTORY)
    assert tree.nodes <= arrange(made, Packing.CHAIN).nodes <= sum(lengths(made)) - merged


@pytest.mark.parametrize("packing", list(Packing))
def test_an_empty_prompt_is_an_error_that_names_the_trajectory(packing: Packing) -> None:
    with pytest.raises(DataError, match="trajectory 3 has an empty prompt"):
        arrange([call([1, 2], 1), call([1], 0, 1, trajectory=3)], packing)


# micro_batches and chunks


@settings(max_examples=30)
@given(ragged_groups(vocabulary=3), EVERY, ANY_SHARING, st.integers(1, 120))
def test_every_pair_is_read_once_after_exactly_what_preceded_it(
    groups: list[Group], packing: Packing, sharing: Sharing, budget: int
) -> None:
    """For each completion token: its id, and everything the model sees before it, are those of the recorded call."""
    batch = flatten(groups)
    parts = [readings_of_tree(tree) for tree in micro_batches(arrange(calls(batch), packing, sharing), budget)]
    found = {flat: reading for part in parts for flat, reading in part.items()}
    assert found == readings(calls(batch))
    assert sum(map(len, parts)) == len(batch)
    assert sorted(found) == list(range(len(batch)))


@settings(max_examples=30)
@given(some_calls(keyed=True), EVERY, BUDGETS)
def test_chunks_read_every_pair_once_after_exactly_what_preceded_it(
    made: list[PackedCall], packing: Packing, budget: int
) -> None:
    for tree in micro_batches(arrange(made, packing), 40):
        parts = [readings_of_chunk(tree, chunk) for chunk in chunks(tree, budget)]
        assert {flat: reading for part in parts for flat, reading in part.items()} == readings_of_tree(tree)
        assert sum(map(len, parts)) == len(tree.flat)


@settings(max_examples=30)
@given(some_calls(keyed=True), EVERY, BUDGETS)
def test_chunks_are_the_tree_within_the_budget_after_their_ancestors(
    made: list[PackedCall], packing: Packing, budget: int
) -> None:
    for tree in micro_batches(arrange(made, packing), 40):
        parts = chunks(tree, budget)
        assert np.concatenate([c.token_ids for c in parts]).tolist() == tree.token_ids.tolist()
        assert np.concatenate([c.position_ids for c in parts]).tolist() == tree.depth.tolist()
        assert [c.start for c in parts] == list(range(0, len(tree), budget))
        for chunk in parts:
            above = [j for j in range(chunk.start) if tree.subtree_end[j] > chunk.start]
            assert 0 < len(chunk.token_ids) <= budget
            assert chunk.context.tolist() == above
            assert tree.depth[chunk.context].tolist() == list(range(len(above)))
            assert len(chunk.subtree_end) == len(above) + len(chunk.token_ids)
            assert chunk.subtree_end.max() <= len(chunk.subtree_end)
            assert ((chunk.source >= 0) & (chunk.source < len(chunk.token_ids))).all()
            integers = (chunk.position_ids, chunk.context, chunk.subtree_end, chunk.source, chunk.flat)
            assert {a.dtype.name for a in integers} == {"int64"}
            assert chunk.token_ids.dtype == chunk.target_ids.dtype == "int32"


# Cuts


def thirds(tree_nodes: Sequence[int], budget: int) -> int:
    """What trees of these sizes cost, in thirds of a node: a tree in chunks costs 4/3 a node."""
    return sum(n * (4 if n > budget else 3) for n in tree_nodes)


def ways_to_cut(arranged: Arrangement, budget: int, start: int = 0) -> Iterator[list[int]]:
    """The sizes of the trees, for every allowed way: within the budget unless a longer call is in it, and then only if
    each call shares more than an eighth of the budget with the one before."""
    count = len(arranged.calls)
    if start == count:
        yield []
    for end in range(start + 1, count + 1):
        size = sum(lengths(arranged.calls[start:end])) - sum(arranged.shared[start + 1 : end].tolist())
        tied = all(shared > budget / 8 for shared in arranged.shared[start + 1 : end].tolist())
        if size <= budget or (tied and max(lengths(arranged.calls[start:end])) > budget):
            yield from ([size, *rest] for rest in ways_to_cut(arranged, budget, end))


@st.composite
def arrangements(draw: st.DrawFn) -> Arrangement:
    """Of calls that share anything with the one before and are longer than those of `some_calls`."""
    made: list[PackedCall] = []
    shared = []
    ids: list[int] = []
    for number in range(draw(st.integers(0, 8))):
        kept = draw(st.integers(0, len(ids)))
        fresh = draw(st.integers(0 if kept > 1 else 2, 8))
        ids = ids[:kept] + [100 * number + n for n in range(fresh)]
        made.append(call(ids, len(ids) - 1, number))
        shared.append(kept)
    return Arrangement(tuple(made), np.array(shared, np.int64))


@given(arrangements(), st.integers(2, 30))
def test_no_other_cut_costs_less_or_as_much_with_fewer_trees(arranged: Arrangement, budget: int) -> None:
    sizes = [len(tree) for tree in micro_batches(arranged, budget)]
    best = min((thirds(way, budget), len(way)) for way in ways_to_cut(arranged, budget))
    assert (thirds(sizes, budget), len(sizes)) == best


@settings(max_examples=30)
@given(some_calls(max_calls=12, keyed=True), EVERY, BUDGETS)
def test_trees_are_within_the_budget_unless_they_hold_a_longer_call(
    made: list[PackedCall], packing: Packing, budget: int
) -> None:
    arranged = arrange(made, packing)
    length_of_flat = {c.first: len(c.token_ids) for c in arranged.calls}
    trees = micro_batches(arranged, budget)
    for tree in trees:
        inside = [length_of_flat[flat] for flat in tree.flat.tolist() if flat in length_of_flat]
        assert len(tree) <= budget or max(inside) > budget
    if budget >= arranged.nodes:
        assert [len(tree) for tree in trees] == [arranged.nodes] * bool(made and arranged.nodes)


# Trees or chains


def spent(trees: Sequence[PrefixTree], budget: int) -> tuple[int, int, int]:
    """Scores of attention, nodes, and nodes where a pass costs half a budget more; in sixths, chunked 8, else 6."""
    total = [0, 0, 0]
    for tree in trees:
        parts = chunks(tree, budget)
        sixths = 8 if len(parts) > 1 else 6
        scores = sum(len(seen(tree.subtree_end, node)) for node in range(len(tree)))
        for at, amount in enumerate((scores, len(tree), len(tree) + len(parts) * budget / 2)):
            total[at] += int(sixths * amount)
    return total[0], total[1], total[2]


def cheaper(one: Sequence[PrefixTree], other: Sequence[PrefixTree], budget: int) -> bool:
    return all(a <= b for a, b in zip(spent(one, budget), spent(other, budget), strict=True))


def alone(lengths: Sequence[int], opening: Sequence[int] = ()) -> list[PackedCall]:
    """Calls of a trajectory each, in one group, the same opening before ids that only one has, the longest first."""
    order = np.argsort(np.argsort(-np.array(lengths), kind="stable")).tolist()
    made = [[*opening, *range(100 * rank, 100 * rank + n)] for rank, n in zip(order, lengths, strict=True)]
    return [call(ids, len(ids) - 1, n, trajectory=n) for n, ids in enumerate(made)]


ALONE = st.builds(alone, st.lists(st.integers(2, 20), max_size=9), st.lists(st.just(7), max_size=20))


@settings(max_examples=30)
@given(some_calls(max_calls=12, keyed=True) | ALONE, ANY_SHARING, st.integers(2, 40))
def test_trees_compute_no_more_scores_nodes_and_passes_than_chains(
    made: list[PackedCall], sharing: Sharing, budget: int
) -> None:
    trees = lay_out(made, Packing.TREE, sharing, budget)
    assert cheaper(trees, lay_out(made, Packing.CHAIN, sharing, budget), budget)
    assert {flat: reading for tree in trees for flat, reading in readings_of_tree(tree).items()} == readings(made)
    assert sum(len(tree.flat) for tree in trees) == len(readings(made))


def test_trees_do_not_leave_passes_half_empty_that_chains_fill() -> None:
    made = alone([5, 3, 5, 3])
    assert [len(tree) for tree in micro_batches(arrange(made, Packing.TREE), 8)] == [5, 5, 6]
    for sharing in (Sharing.GROUP, Sharing.BATCH):
        assert [len(tree) for tree in lay_out(made, Packing.TREE, sharing, 8)] == [8, 8]


def test_where_no_two_attempts_fit_trees_are_the_chains() -> None:
    made = []
    for attempt in range(4):
        ids = [*range(10), *(attempt + 100 * n for n in range(1, 31))]
        made += [call(ids[:end], end - 5, 10 * attempt + n, attempt) for n, end in enumerate((20, 30, 40))]
    trees, chains = (
        sorted((tree.token_ids.tolist(), tree.subtree_end.tolist(), tree.source.tolist()) for tree in layout)
        for layout in (lay_out(made, packing, Sharing.GROUP, 60) for packing in (Packing.TREE, Packing.CHAIN))
    )
    assert trees == chains and len(trees) == 4


def test_forks_that_save_next_to_nothing_are_not_made() -> None:
    made = alone([40] * 4, opening=[7])
    assert [tree.forks for tree in micro_batches(arrange(made, Packing.TREE), 1000)] == [True]
    assert [(len(tree), tree.forks) for tree in lay_out(made, Packing.TREE, Sharing.GROUP, 1000)] == [(164, False)]
    made = alone([40] * 4, opening=[7] * 10)
    assert [(len(tree), tree.forks) for tree in lay_out(made, Packing.TREE, Sharing.GROUP, 1000)] == [(170, True)]


# Agents as they are


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
