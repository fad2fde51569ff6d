"""Which rank computes which tree, and when: slots, in each of which every rank makes equally many forward passes.

Ranks that share a model's parameters meet in every forward and backward pass. They stay together only if all make the
same sequence of passes, for which equally many trees are not enough: a tree in c > 1 chunks takes c passes without
gradient and then c with one, a tree in one chunk takes one.

    3 ranks, chunks a tree:  5 1 1 1 1  ->  slot of (5 1 1), in 5 passes; slot of (1 1 -), in 1 pass
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treadle.packing.tree import PrefixTree

# A node's linear layers cost as much as about six scores of attention for each unit of the model's width.
_LINEAR = 4096
_NO_TREE = PrefixTree.of((), np.empty(0, np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """What all ranks compute side by side: one tree each, an empty one where there are no more.

    passes: how many forward passes every tree is computed in, the most that one of them needs.
    padded: passes that train nothing, of all ranks together.
    """

    trees: tuple[PrefixTree, ...]
    passes: int
    padded: int


def slots(trees: Sequence[PrefixTree], ranks: int, passes_of: Callable[[PrefixTree], int]) -> list[Slot]:
    """Deal trees to ranks, one a slot. passes_of: how many passes a tree needs.

    A slot lasts as long as its slowest tree. Neighbours by passes, then cost, share one, which makes the sum over slots
    of the most passes as small as it can be; at most (ranks - 1) times the passes of the largest tree are padding.
    Slots are in the order of their first trees: one rank computes the trees as they come.
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
    """Return about how long a tree takes: in attention, a node has one score for each ancestor and itself."""
    return int((tree.depth + 1).sum()) + _LINEAR * len(tree)


def balance(laid_out: Sequence[Slot]) -> float:
    """Return the share of the ranks' time in which they compute trees rather than wait for the slowest of a slot."""
    costs = [[cost(tree) for tree in slot.trees] for slot in laid_out]
    slowest = sum(max(each) * len(each) for each in costs)
    return sum(map(sum, costs)) / slowest if slowest else 1.0
