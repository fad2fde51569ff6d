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
