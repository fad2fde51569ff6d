"""Tree attention through one [T, C + T] mask: quadratic, obvious, the reference of the other kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.training.attention.interface import Shape


@dataclass(frozen=True, slots=True)
class Dense:
    """Computes tree attention (`Kernel`) with the whole mask of `visible`."""

    shape: Shape

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible(self.shape, window).to(query.device),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


def visible(shape: Shape, window: int | None) -> Tensor:
    """Return bool[T, C + T], which keys each node sees."""
    keys = torch.arange(len(shape.depth))
    nodes = keys[shape.context :, None]
    mask = (keys <= nodes) & (nodes < shape.subtree_end)
    if window is not None:
        mask &= shape.depth[shape.context :, None] - shape.depth < window
    return mask
