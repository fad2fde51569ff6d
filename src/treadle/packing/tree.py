"""Prefix trees: every shared token is computed once.

    calls --depth_first--> order, shared --PrefixTree.of--> nodes in depth-first order

Sorting calls by the big-endian bytes of their ids puts them in depth-first order of their trie; the longest common
prefixes of neighbors define its entire structure.

Shapes: T unique tokens (nodes) of a tree, P pairs (step, token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from treadle.core.images import ImageIds
from treadle.core.types import Ids, Routing, common_prefix
from treadle.packing.flat import Indices, PackedCall


def depth_first(calls: Sequence[PackedCall], roots: Sequence[int]) -> tuple[list[int], Indices]:
    """Order the calls so that each one's longest prefix shared with any before it is shared with its predecessor.

    Calls with different roots share nothing. Returns (order, shared int64[calls]): the call `order[i]` has its first
    `shared[i]` tokens in common with `order[i - 1]`.
    """
    words = _words(calls)
    # Big-endian bytes compare in the same order as the numbers.
    keys = [(root, w.astype(">i4").tobytes()) for root, w in zip(roots, words, strict=True)]
    order = sorted(range(len(calls)), key=keys.__getitem__)
    shared = np.zeros(len(calls), np.int64)
    for at, (before, this) in enumerate(pairwise(order), 1):
        if roots[before] == roots[this]:
            shared[at] = common_prefix(words[before], words[this])
    return order, shared


def _words(calls: Sequence[PackedCall]) -> list[NDArray[np.int32]]:
    """Return the words that must agree for sharing a node, one per token: its id [L], or id and keys [L, 1 + K]."""
    width = _width(calls)
    if not width:
        return [c.token_ids for c in calls]
    words = [np.full((len(c.token_ids), 1 + width), -1, np.int32) for c in calls]  # -1: no such key
    for word, call in zip(words, calls, strict=True):
        word[:, 0] = call.token_ids
        if call.keys is not None:
            word[:, 1 : 1 + call.keys.shape[1]] = call.keys
    return words


def _width(calls: Sequence[PackedCall]) -> int:
    return max((c.keys.shape[1] for c in calls if c.keys is not None), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """The unique nodes of some calls, in depth-first order.

    token_ids int32[T]; depth int64[T]: number of tokens before it in its sequence, its position id.
    subtree_end int64[T]: node j is i or an ancestor of i exactly if j <= i < subtree_end[j].
    source int64[P]: node whose distribution predicts a pair's token, the parent of the token's node.
    target_ids int32[P]: token to read the log-probability of. flat int64[P]: index of the pair in the flat arrays.
    keys int32[T, K], routing int16[D, M, k], table, axes int64[3, T]: see `PackedCall`; None if no call has any.

    A node is computed once but may have several pairs: steps that share it have separate advantages there.
    """

    token_ids: Ids
    depth: Indices
    subtree_end: Indices
    source: Indices
    target_ids: Ids
    flat: Indices
    keys: NDArray[np.int32] | None = None
    routing: Routing | None = None
    table: ImageIds | None = None
    axes: Indices | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def forks(self) -> bool:
        """Whether some node has more than one child."""
        return bool(((self.depth[1:] != self.depth[:-1] + 1) & (self.depth[1:] > 0)).any())

    @property
    def branches(self) -> NDArray[np.bool_]:
        """Return bool[T], whether a node is the last one before a branch: not followed by its only child."""
        alone = (self.depth[1:] == self.depth[:-1] + 1) & (self.subtree_end[1:] == self.subtree_end[:-1])
        return np.append(~alone, np.ones(min(len(self), 1), np.bool_))

    @classmethod
    def of(cls, calls: Sequence[PackedCall], shared: Indices) -> PrefixTree:
        """Return the tree of calls in depth-first order. shared: see `depth_first`; its first entry is ignored."""
        lengths = np.array([len(c.token_ids) for c in calls], np.int64)
        common = shared.copy()
        common[:1] = 0
        nodes = int((lengths - common).sum())
        token_ids, depth = np.empty(nodes, np.int32), np.empty(nodes, np.int64)
        subtree_end = np.full(nodes, nodes, np.int64)
        width = _width(calls)
        keys = np.full((nodes, width), -1, np.int32) if width else None
        axes = None if all(c.axes is None for c in calls) else np.empty((3, nodes), np.int64)
        # Depth -> node, from the root to the newest leaf.
        path = np.empty(int(lengths.max(initial=0)), np.int64)
        sources: list[Indices] = [np.empty(0, np.int64)]
        size = bottom = 0
        for call, depth_kept, length in zip(calls, common.tolist(), lengths.tolist(), strict=True):
            # These nodes get no further descendants.
            subtree_end[path[depth_kept:bottom]] = size
            end = size + length - depth_kept
            token_ids[size:end] = call.token_ids[depth_kept:]
            depth[size:end] = np.arange(depth_kept, length)
            if keys is not None and call.keys is not None:
                keys[size:end, : call.keys.shape[1]] = call.keys[depth_kept:]
            if axes is not None:
                axes[:, size:end] = depth[size:end] if call.axes is None else call.axes[:, depth_kept:]
            path[depth_kept:length] = np.arange(size, end)
            sources.append(path[call.prompt_length - 1 : length - 1].copy())
            size, bottom = end, length
        table = next((c.table for c in calls if c.table is not None), None)
        targets = np.concatenate([np.empty(0, np.int32), *(c.token_ids[c.prompt_length :] for c in calls)])
        return cls(
            token_ids,
            depth,
            subtree_end,
            source=np.concatenate(sources),
            target_ids=targets if table is None else table.plain(targets),
            flat=np.concatenate(
                [np.empty(0, np.int64), *(c.first + np.arange(len(c.token_ids) - c.prompt_length) for c in calls)]
            ),
            keys=keys,
            routing=next((c.routing for c in calls if c.routing is not None), None),
            table=table,
            axes=axes,
        )
