"""What transformers calls in place of its own attention, and the tree that it attends to.

Shapes: see `treadle.training.attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from treadle.core.errors import ConfigError
from treadle.packing.flat import Indices
from treadle.packing.layout import MicroBatch

ATTENTION = "treadle_tree"


@dataclass(frozen=True, slots=True)
class Shape:
    """Which nodes of one micro-batch see which keys, as a kernel needs it.

    depth int64[C + T]: of every key, its position. subtree_end int64[C + T]: node i sees key j exactly if
    j <= context + i < subtree_end[j]; through a sliding window only if also depth_i - depth_j < window.
    """

    depth: Tensor
    subtree_end: Tensor
    context: int

    @classmethod
    def of(cls, batch: MicroBatch) -> Shape:
        """Return the shape of a micro-batch, on the CPU: kernels move what they need."""
        depth = torch.from_numpy(batch.position_ids)
        return cls(
            torch.cat([torch.arange(len(batch.context)), depth]),
            torch.from_numpy(batch.subtree_end),
            len(batch.context),
        )

    @property
    def nodes(self) -> int:
        return len(self.depth) - self.context


class Kernel(Protocol):
    """Computes tree attention, for all layers of one forward pass over one tree."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention output [T, H, D] of query [T, H, D] over key and value [C + T, K, D].

        scale: factor of the scores. window: size of the layer's sliding window in tokens, None without one.
        """


KeysAndValues = tuple[Tensor, Tensor]  # [1, K, n, D] each, as layers make them


class Tree:
    """Carries the tree to every attention layer of a forward pass, as its argument `tree=`.

    context: keys and values of the C nodes outside, by layer; none if C is 0.
    fresh: where layers leave the keys and values of the T nodes; None if they are not needed.
    attended: layer -> the sliding window with which it attended.

    It is no dataclass, nor a dict, on purpose: FSDP2 looks into those among a module's arguments and hands the module
    copies, in which what layers leave would be lost.
    """

    __slots__ = ("attended", "context", "fresh", "kernel")

    def __init__(
        self,
        kernel: Kernel,
        context: Mapping[int, KeysAndValues] = MappingProxyType({}),
        fresh: dict[int, KeysAndValues] | None = None,
    ) -> None:
        self.kernel, self.context, self.fresh = kernel, context, fresh
        self.attended: dict[int, int | None] = {}


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tree: Tree | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention through the tree: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises ConfigError for a layer that asks for what tree attention cannot express.
    """
    name = type(module).__name__
    if tree is None:
        raise ConfigError(f"{name} drops keyword arguments on the way to attention; it cannot be packed")
    if softcap is not None or s_aux is not None:
        raise ConfigError(f"{name} uses soft-capped or sink attention, which tree attention does not implement")
    if attention_mask is not None:  # transformers makes none for attention that it does not know
        raise ConfigError(f"{name} makes an attention mask of its own, which tree attention does not implement")
    if dropout > 0:
        raise ConfigError(f"{name} has attention dropout {dropout}; packing needs 0 (set attention_dropout: 0)")
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{name} is not causal; it cannot be packed")
    query, key, value = _autocast(query, key, value)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    tree.attended[layer] = sliding_window
    if tree.fresh is not None:
        tree.fresh[layer] = key, value
    if tree.context:
        earlier_key, earlier_value = tree.context[layer]
        key, value = torch.cat([earlier_key, key], 2), torch.cat([earlier_value, value], 2)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    size = value.shape[-1]
    value = F.pad(value, (0, query.shape[-1] - size))  # latent attention has smaller values; kernels want one size
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return tree.kernel(q, k, v, scale, sliding_window)[None, ..., :size], None


def _autocast(*tensors: Tensor) -> Iterator[Tensor]:
    """Cast as autocast does for stock attention. Norms and rotary embeddings leave queries and keys in float32, while
    values come in half precision."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return iter(tensors)
    dtype = torch.get_autocast_dtype(device)
    return (x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


AttentionInterface.register(ATTENTION, tree_attention)


class KeyValueStore:
    """Keys and values [1, K, T, D] of every layer of a tree that is computed in chunks, and gradients of that shape.

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
