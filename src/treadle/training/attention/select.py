"""The choice of a device's tree-attention kernel, and the reference for all kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.models.attention import attention_weights
from treadle.training.attention.flex import Flex
from treadle.training.attention.interface import Kernel, Shape
from treadle.training.attention.tiles import Tiles
from treadle.training.attention.varlen import Varlen, gathered


@dataclass(frozen=True, slots=True)
class Dense:
    """Computes tree attention (`Kernel`) with the full mask of `visible`."""

    shape: Shape

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        seen, group = visible(self.shape, window).to(query.device), query.shape[1] // key.shape[1]
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        if sinks is None and softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=group > 1)
        else:
            scores = scale * (q @ k.repeat_interleave(group, 1).mT)
            weights = attention_weights(scores, seen, None if sinks is None else sinks[:, None, None], softcap)
            out = weights.to(v.dtype) @ v.repeat_interleave(group, 1)
        return out[0].transpose(0, 1)


def visible(shape: Shape, window: int | None) -> Tensor:
    """Return bool[T, C + T]: which keys each node sees."""
    keys = torch.arange(len(shape.depth))
    nodes = keys[shape.context :, None]
    mask = (keys <= nodes) & (nodes < shape.subtree_end)
    if window is not None:
        mask &= shape.depth[shape.context :, None] - shape.depth < window
    if (ahead := shape.ahead_with(window)) is not None:
        mask |= (keys > nodes) & (keys < ahead[:, None])
    return mask


KERNELS: Mapping[str, Callable[[Shape], Kernel]] = MappingProxyType(
    {"tiles": Tiles, "dense": Dense, "varlen": Varlen, "flex": Flex}
)

_COPIES = 4  # `Varlen` keeps gathered keys and values until the backward pass: limit, in multiples of the tree's own


def kernel_for(device: torch.device) -> Callable[[Shape], Kernel]:
    """Return the constructor of this device's kernel."""
    return Cuda.of if device.type == "cuda" else Dense if device.type == "mps" else Tiles


@dataclass(frozen=True, slots=True)
class Cuda:
    """Computes tree attention (`Kernel`) on GPUs: by `Varlen` where possible, otherwise by `Flex`.

    `Varlen` needs half precision, attention without sinks, soft caps and images seen both ways, and a tree with limited
    sharing, so that gathered keys do not fill the memory.
    """

    shape: Shape
    varlen: Kernel
    flex: Kernel

    @classmethod
    def of(cls, shape: Shape) -> Cuda:
        return cls(shape, Varlen(shape), Flex(shape))

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        size = query.shape[2]
        flash = query.dtype in (torch.float16, torch.bfloat16) and size % 8 == 0 and size <= 256
        few = gathered(self.shape, window) <= _COPIES * len(self.shape.depth)
        plain = sinks is None and softcap is None and self.shape.ahead_with(window) is None
        kernel = self.varlen if flash and plain and few else self.flex
        return kernel(query, key, value, scale, window, sinks, softcap)
