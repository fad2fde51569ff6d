"""Keys and values of a tree that is computed in chunks, and their gradients.

Shapes: T nodes of the tree, C of a chunk's context, n of a chunk, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from treadle.packing.flat import Indices
from treadle.packing.layout import MicroBatch
from treadle.training.attention.interface import KeysAndValues


class KeyValueStore:
    """Keys and values [1, K, T, D] of every layer, and gradients of the same shape.

    First pass: `put` what each chunk computed; `at` returns what the next ones need of it. Second pass, last chunk
    first: `leaves` for its context, back-propagate from `pending`, `collect` what reached the leaves.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._values: dict[int, KeysAndValues] = {}
        self._gradients: dict[int, KeysAndValues] = {}

    def put(self, part: MicroBatch, fresh: Mapping[int, KeysAndValues]) -> None:
        """Store the keys and values [1, K, n, D] that the chunk's layers computed, by layer."""
        for layer, made in fresh.items():
            if layer not in self._values:
                self._values[layer] = _empty(made, self.nodes)
            for whole, new in zip(self._values[layer], made, strict=True):
                whole[:, :, part.start : part.start + len(part.token_ids)] = new.detach()

    def at(self, context: Indices) -> dict[int, KeysAndValues]:
        """Return keys and values [1, K, C, D] of these nodes for each layer; an empty dict for an empty context."""
        if not len(context):
            return {}
        selected = {}
        for layer, (key, value) in self._values.items():
            rows = torch.from_numpy(context).to(key.device)
            selected[layer] = key.index_select(2, rows), value.index_select(2, rows)
        return selected

    def leaves(self, context: Indices) -> dict[int, KeysAndValues]:
        """Return the same as `at`, as leaves that collect gradients."""
        return {layer: (k.requires_grad_(), v.requires_grad_()) for layer, (k, v) in self.at(context).items()}

    def pending(self, part: MicroBatch, fresh: Mapping[int, KeysAndValues]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the chunk's keys and values, and for each the gradient that later chunks have collected for it."""
        rows = slice(part.start, part.start + len(part.token_ids))
        roots, gradients = [], []
        for layer, collected in self._gradients.items():
            for made, gradient in zip(fresh[layer], collected, strict=True):
                roots.append(made)
                gradients.append(gradient[:, :, rows].to(made.dtype))
        return roots, gradients

    def collect(self, context: Indices, leaves: Mapping[int, KeysAndValues]) -> None:
        """Add the leaves' gradients to those of the context's nodes."""
        for layer, pair in leaves.items():
            if layer not in self._gradients:
                wide = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in pair)
                self._gradients[layer] = tuple(x.zero_() for x in _empty(wide, self.nodes))  # type: ignore[assignment]
            for whole, leaf in zip(self._gradients[layer], pair, strict=True):
                if leaf.grad is not None:
                    rows = torch.from_numpy(context).to(whole.device)
                    whole.index_add_(2, rows, leaf.grad.to(whole.dtype))


def _empty(like: tuple[Tensor, ...], nodes: int) -> KeysAndValues:
    key, value = (x.new_empty(1, x.shape[1], nodes, x.shape[3]) for x in like)
    return key, value
