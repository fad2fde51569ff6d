"""The reference sees exactly what the tree says: ancestors, found without `subtree_end`."""

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.training.attention.trees import WINDOWS, Problem, chain, gap, parts
from treadle.packing.layout import MicroBatch
from treadle.packing.tree import PrefixTree
from treadle.training.attention.interface import Shape
from treadle.training.attention.select import Dense, visible


def ancestors(tree: PrefixTree) -> list[set[int]]:
    """Of each node, and itself: a node's parent is the last one before it that is one token shorter."""
    found: list[set[int]] = []
    newest: dict[int, int] = {}
    for node, depth in enumerate(tree.depth.tolist()):
        newest[depth] = node
        found.append({node} | (found[newest[depth - 1]] if depth else set()))
    return found


@pytest.mark.parametrize("window", WINDOWS)
@given(part=parts())
def test_a_node_sees_its_ancestors_and_itself(window: int | None, part: tuple[PrefixTree, MicroBatch]) -> None:
    tree, batch = part
    nodes = range(batch.start, batch.start + len(batch.token_ids))
    above = ancestors(tree)
    assert visible(Shape.of(batch), window).tolist() == [
        [
            key in above[node] and (window is None or tree.depth[node] - tree.depth[key] < window)
            for key in [*batch.context.tolist(), *nodes]
        ]
        for node in nodes
    ]


def test_it_is_the_softmax_of_scaled_scores() -> None:
    """By hand, without torch's attention: two query heads to one key head."""
    shape = chain(5, context=2)
    problem = Problem.of(shape, window=3, scale=0.7)
    q, k, v = (x.numpy() for x in (problem.query, problem.key, problem.value))
    out = np.zeros(q.shape)
    for node in range(5):
        for head in range(4):
            keys = range(max(0, node + 2 - 2), node + 3)
            weights = np.exp([0.7 * q[node, head] @ k[key, head // 2] for key in keys])
            out[node, head] = sum(w * v[key, head // 2] for w, key in zip(weights / weights.sum(), keys, strict=True))
    assert gap(problem.forward(Dense(shape)), torch.from_numpy(out)) < 1e-14
