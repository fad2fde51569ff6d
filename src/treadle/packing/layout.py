"""Packing: recorded steps -> prefix trees -> micro-batches. It affects only cost.

    calls --arrange(step | chain | tree)--> Arrangement --cut(budget)--> PrefixTree* --chunks(budget)--> MicroBatch*

`step`, `chain` and `tree` are one mechanism: an arrangement says how many tokens each call shares with the previous
one, and the packing decides how much of that is used (nothing, whole earlier calls, everything). `lay_out` does both
steps, and falls back to chains if trees have no advantage under the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import DataError
from treadle.core.images import ImageIds, image_ends
from treadle.core.types import Ids, Routing
from treadle.packing.flat import Indices, PackedCall
from treadle.packing.tree import PrefixTree, depth_first


class Packing(StrEnum):
    """How steps share tokens in the forward pass."""

    STEP = "step"  # every step is a separate sequence
    CHAIN = "chain"  # a step whose prompt begins with an earlier step's tokens continues its sequence
    TREE = "tree"  # every common prefix is computed once


class Sharing(StrEnum):
    """Scope within which `tree` packing shares prefixes."""

    TRAJECTORY = "trajectory"
    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """Calls in computation order.

    shared int64[calls]: number of leading tokens that call i shares with call i - 1.
    """

    calls: tuple[PackedCall, ...]
    shared: Indices

    @property
    def lengths(self) -> Indices:
        """Return int64[calls]: the length of each call in tokens."""
        return np.array([len(c.token_ids) for c in self.calls], np.int64)

    @property
    def costs(self) -> tuple[Indices, Indices]:
        """Return what each call costs of a budget, int64[calls], and the tokens that it shares with the call before."""
        if all(call.table is None for call in self.calls):
            return self.lengths, self.shared
        upto = [np.append(0, costs(call).cumsum()) for call in self.calls]
        shared = [sums[count] for sums, count in zip(upto, self.shared.tolist(), strict=True)]
        return np.array([sums[-1] for sums in upto], np.int64), np.array(shared, np.int64)

    @property
    def nodes(self) -> int:
        """Return the number of tokens computed if nothing is cut."""
        return int((self.lengths - self.shared).sum())


def costs(of: PackedCall | PrefixTree) -> Indices:
    """Return what each token or node costs of a budget, int64[T]: one, a placeholder also of the trained tower."""
    return np.ones(len(of.token_ids), np.int64) if of.table is None else of.table.costs(of.token_ids)


def arrange(calls: Sequence[PackedCall], packing: Packing, sharing: Sharing = Sharing.GROUP) -> Arrangement:
    """Order calls for a packing. Calls without completion tokens have nothing to train and are left out.

    Raises DataError for a call with an empty prompt: nothing precedes its first token.
    """
    trained = [c for c in calls if len(c.token_ids) > c.prompt_length]
    for call in trained:
        if call.prompt_length < 1:
            raise DataError(f"a call of trajectory {call.trajectory} has an empty prompt")
    if packing is Packing.STEP:
        return Arrangement(tuple(trained), np.zeros(len(trained), np.int64))
    within = Sharing.TRAJECTORY if packing is Packing.CHAIN else sharing
    roots = [_owner(c, within) for c in trained]
    order, shared = depth_first(trained, roots)
    arranged = Arrangement(tuple(trained[i] for i in order), shared)
    return _chains(arranged) if packing is Packing.CHAIN else arranged


def _owner(call: PackedCall, sharing: Sharing) -> int:
    return {Sharing.TRAJECTORY: call.trajectory, Sharing.GROUP: call.group, Sharing.BATCH: 0}[sharing]


def _chains(arranged: Arrangement) -> Arrangement:
    """Undo all sharing except of whole earlier calls, each by one later call, whichever calls came between.

    Walks the tree with a stack of calls that are prefixes of the current one; each may be continued once, by a call
    whose prompt it begins.
    """
    chains: list[list[int]] = []
    path: list[tuple[int, int]] = []  # (call, its chain), each a prefix of the next
    lengths = arranged.lengths.tolist()
    for this, (call, shared) in enumerate(zip(arranged.calls, arranged.shared.tolist(), strict=True)):
        while path and lengths[path[-1][0]] > shared:
            path.pop()
        fits = (c for at, c in reversed(path) if chains[c][-1] == at and lengths[at] <= call.prompt_length)
        chain = next(fits, len(chains))
        if chain == len(chains):
            chains.append([])
        chains[chain].append(this)
        path.append((this, chain))
    order = [at for chain in chains for at in chain]
    kept = [kept for chain in chains for kept in (0, *(lengths[at] for at in chain[:-1]))]
    return Arrangement(tuple(arranged.calls[i] for i in order), np.array(kept, np.int64))


def lay_out(calls: Sequence[PackedCall], packing: Packing, sharing: Sharing, budget: int) -> list[PrefixTree]:
    """Arrange calls and cut them for a budget, such that `tree` costs no more than `chain`.

    Under a small budget, forks can cost more than sharing saves, and a tree's order can leave passes half empty that
    chains would fill. Trees then share within a narrower scope than `sharing`; if that does not help, chains are
    returned.
    """
    if packing is not Packing.TREE:
        return micro_batches(arrange(calls, packing), budget)
    chains = micro_batches(arrange(calls, Packing.CHAIN), budget)
    bounds = _expenses(chains, budget)
    scopes = list(Sharing)
    for within in reversed(scopes[: scopes.index(sharing) + 1]):
        trees = micro_batches(arrange(calls, packing, within), budget)
        if all(ours <= theirs for ours, theirs in zip(_expenses(trees, budget), bounds, strict=True)):
            return trees
    return chains


def _expenses(trees: Sequence[PrefixTree], budget: int) -> tuple[float, ...]:
    """Return the cost of trees in three units, which devices and models weigh differently.

    Attention scores; nodes; nodes plus half a budget per pass, for small models on a GPU, which wait for the host.
    """
    scores = nodes = passes = 0.0
    for tree in trees:
        count = math.ceil(int(costs(tree).sum()) / budget)
        factor = _CHUNKED if count > 1 else 1.0
        scores += factor * int((tree.depth + 1).sum())
        nodes += factor * len(tree) * (1 + _FORKED * tree.forks)
        passes += factor * count
    return scores, nodes, nodes + passes * budget / 2


def micro_batches(arranged: Arrangement, budget: int) -> list[PrefixTree]:
    """Cut an arrangement into trees that cost at most `budget`, except trees that contain a longer call.

    Compute those in `chunks`. Calls on both sides of a cut compute their shared tokens twice.
    """
    return [PrefixTree.of(arranged.calls[a:b], arranged.shared[a:b]) for a, b in _cuts(arranged, budget)]


# A tree in chunks costs two forward passes and a backward pass, which is twice a forward pass: 4/3 of an ordinary tree.
_CHUNKED = 4 / 3
# Forks cost about 3% of a tree: parts of a softmax are merged on a CPU, keys gathered on a GPU.
_FORKED = 1 / 32
_CUT = 1e-3  # prefers fewer trees among equals: less than one token
# A tree over the budget keeps the keys and values of all its nodes. Calls join it only if they share more than this
# fraction of the budget with it; below that, a cut costs little and bounds the memory.
_LOOSE = 1 / 8


def _cuts(arranged: Arrangement, budget: int) -> list[tuple[int, int]]:
    """Return the cheapest contiguous ranges of calls, by dynamic programming over the last range.

    A cut before call c computes exactly shared[c] nodes a second time.
    """
    lengths, shared = arranged.costs
    count = len(lengths)
    # Nodes of calls [0, i) if nothing is cut.
    upto = np.concatenate([[0], np.cumsum(lengths - shared)])
    least = np.zeros(count + 1)
    start_of = np.zeros(count + 1, np.int64)
    # Start of the widest range within the budget that ends here; it only increases.
    first = 0
    # Calls [0, long) end with the last one longer than the budget.
    long = 0
    # Calls [tied, end) share enough to go over the budget together.
    tied = 0
    for end in range(1, count + 1):
        if shared[end - 1] <= _LOOSE * budget:
            tied = end - 1
        if lengths[end - 1] > budget:
            long = end
        while first < end and upto[end] - upto[first] + shared[first] > budget:
            first += 1
        starts = np.concatenate([np.arange(tied, min(long, first)), np.arange(first, end)])
        nodes = upto[end] - upto[starts] + shared[starts]
        cost = least[starts] + np.where(nodes > budget, _CHUNKED, 1.0) * nodes + _CUT
        best = int(cost.argmin())
        least[end], start_of[end] = cost[best], starts[best]
    ranges: list[tuple[int, int]] = []
    end = count
    while end:
        ranges.append((int(start_of[end]), end))
        end = int(start_of[end])
    return ranges[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Nodes [start, start + T) of a tree, computed in one forward pass over the keys and values of C ancestors.

    token_ids int32[T]; position_ids int64[T].
    context int64[C]: ancestors of its first node, root first. Key j < C has position j.
    subtree_end int64[C + T]: node i sees key j exactly if j <= C + i < subtree_end[j].
    source int64[P]: node whose distribution predicts a pair's token. target_ids int32[P], flat int64[P]: see
    `PrefixTree`. branches bool[T]: whether a node is the last one before a branch of the tree. kept bool[T]: whether
    later micro-batches have descendants of it. routing int16[T, M, k]: experts to replay, -1 for none; None if there
    are none anywhere. table, axes int64[3, T]: see `PackedCall`.
    """

    start: int
    token_ids: Ids
    position_ids: Indices
    context: Indices
    subtree_end: Indices
    source: Indices
    target_ids: Ids
    flat: Indices
    branches: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    routing: Routing | None = None
    table: ImageIds | None = None
    axes: Indices | None = None


def cuts(tree: PrefixTree, budget: int, whole_images: bool = False) -> list[tuple[int, int]]:
    """Return the bounds of the pieces of `chunks`."""
    if tree.table is None:
        return [(start, min(start + budget, len(tree))) for start in range(0, len(tree), budget)]
    upto = np.append(0, costs(tree).cumsum())
    # Nodes before which a piece may begin, and the end.
    uncut = np.unique(image_ends(tree.token_ids, tree.depth)) if whole_images else np.arange(1, len(tree) + 1)
    bounds, start = [], 0
    while start < len(tree):
        widest = int(np.searchsorted(upto, upto[start] + budget, "right")) - 1
        following = int(np.searchsorted(uncut, start, "right"))
        end = int(uncut[max(following, int(np.searchsorted(uncut, widest, "right")) - 1)])
        bounds.append((start, end))
        start = end
    return bounds


def chunks(tree: PrefixTree, budget: int, count: int = 0, whole_images: bool = False) -> list[MicroBatch]:
    """Return the tree in depth-first pieces that cost at most `budget`; one piece, without context, if it fits.

    whole_images: cut between images, not inside; a piece may then be as long as an image is. A piece has at least one
    node.

    Later nodes need from earlier ones only the keys and values of their ancestors, and all ancestors of a piece outside
    it are ancestors of its first node.
    count: minimum number of pieces; surplus ones have one node each, after the tree's own, and no pairs.
    """
    pairs = np.argsort(tree.source, kind="stable")
    sources = tree.source[pairs]
    context, branches = np.empty(0, np.int64), tree.branches
    pieces = []
    for start, end in cuts(tree, budget, whole_images):
        first, last = np.searchsorted(sources, (start, end))
        pieces.append(_chunk(tree, start, end, context, np.sort(pairs[first:last]), branches))
        keys = np.concatenate([context, np.arange(start, end)])
        context = keys[tree.subtree_end[keys] > end]
    return pieces + [_padding(len(tree) + i) for i in range(count - len(pieces))]


def _chunk(
    tree: PrefixTree, start: int, end: int, context: Indices, pairs: Indices, branches: NDArray[np.bool_]
) -> MicroBatch:
    keys = np.concatenate([context, np.arange(start, end)])
    return MicroBatch(
        start=start,
        token_ids=tree.token_ids[start:end],
        position_ids=tree.depth[start:end],
        context=context,
        subtree_end=np.minimum(tree.subtree_end[keys], end) - start + len(context),
        source=tree.source[pairs] - start,
        target_ids=tree.target_ids[pairs],
        flat=tree.flat[pairs],
        branches=branches[start:end],
        kept=tree.subtree_end[start:end] > end,
        routing=_routing(tree, start, end),
        table=tree.table,
        axes=None if tree.axes is None else tree.axes[:, start:end],
    )


def _padding(start: int) -> MicroBatch:
    """Return a nearly free piece that trains nothing."""
    none = np.empty(0, np.int64)
    return MicroBatch(
        start,
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
        none,
        np.ones(1, np.int64),
        none,
        np.empty(0, np.int32),
        none,
        np.ones(1, np.bool_),
        np.zeros(1, np.bool_),
    )


def _routing(tree: PrefixTree, start: int, end: int) -> Routing | None:
    if tree.keys is None or tree.routing is None:
        return None
    which = tree.keys[start:end, 0]
    return np.where(which[:, None, None] < 0, np.int16(-1), tree.routing[which]) if (which >= 0).any() else None


def row_batches(arranged: Arrangement, budget: int) -> list[PrefixTree]:
    """Group calls that share nothing so that each group, padded to its longest call, fits the budget.

    Raises DataError for a call longer than the budget.
    """
    ordered = sorted(arranged.calls, key=lambda c: -len(c.token_ids))
    if ordered and len(ordered[0].token_ids) > budget:
        raise DataError(
            f"a call of {len(ordered[0].token_ids)} tokens exceeds max_tokens_per_microbatch = {budget}, and this "
            "model's layers cannot be computed in pieces; raise the budget or shorten the context"
        )
    parts: list[list[PackedCall]] = []
    towers = 0  # tokens of the trained tower for a group's images; a call alone may exceed the budget by its own
    for call in ordered:
        tower = int(costs(call).sum()) - len(call.token_ids)
        towers += tower
        if not parts or len(parts[-1][0].token_ids) * (len(parts[-1]) + 1) + towers > budget:
            parts.append([])
            towers = tower
        parts[-1].append(call)
    return [PrefixTree.of(part, np.zeros(len(part), np.int64)) for part in parts]


# Per unit of model width, a node's linear layers cost about six attention scores.
_LINEAR = 4096
_NO_TREE = PrefixTree.of((), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Trees that all ranks compute side by side: one each, or an empty one if none is left.

    passes: number of forward passes for every tree, the maximum any of them needs.
    padded: passes that train nothing, summed over all ranks.
    """

    trees: tuple[PrefixTree, ...]
    passes: int
    padded: int


def slots(trees: Sequence[PrefixTree], ranks: int, passes_of: Callable[[PrefixTree], int]) -> list[Slot]:
    """Deal trees to ranks, one per slot. passes_of: number of passes a tree needs.

    Ranks that share a model's parameters meet in every forward and backward pass, and stay together only if all make
    the same sequence of passes. Equal numbers of trees do not suffice: a tree in c > 1 chunks takes c passes without
    gradient and then c with one; a tree in one chunk takes one.

        3 ranks, chunks per tree:  5 1 1 1 1  ->  slot of (5 1 1), in 5 passes; slot of (1 1 -), in 1 pass

    A slot lasts as long as its slowest tree. Trees adjacent by passes, then cost, share a slot, which minimizes the sum
    over slots of the largest number of passes; padding is at most (ranks - 1) times the passes of the largest tree.
    Slots are in the order of their first trees: a single rank computes the trees in their given order.
    """
    needed = [passes_of(tree) for tree in trees]
    order = sorted(range(len(trees)), key=lambda i: (-needed[i], -cost(trees[i]), i))
    dealt = [order[at : at + ranks] for at in range(0, len(order), ranks)]
    made = []
    for members in sorted(dealt, key=min):
        passes = max(needed[i] for i in members)
        fill = (_NO_TREE,) * (ranks - len(members))
        padded = passes * ranks - sum(needed[i] for i in members)
        made.append(Slot((*(trees[i] for i in members), *fill), passes, padded))
    return made


def cost(tree: PrefixTree) -> int:
    """Return the approximate time of a tree: in attention, a node has one score per ancestor and one for itself."""
    return int((tree.depth + 1).sum()) + _LINEAR * len(tree)


def balance(laid_out: Sequence[Slot]) -> float:
    """Return the share of the ranks' time spent computing rather than waiting for the slowest of a slot."""
    costs = [[cost(tree) for tree in slot.trees] for slot in laid_out]
    slowest = sum(max(each) * len(each) for each in costs)
    return sum(map(sum, costs)) / slowest if slowest else 1.0
