"""Tree attention on GPUs by FlexAttention, in any precision.

The extremes of `subtree_end` and `depth` in each block show which pairs of blocks have anything to compute, so nothing
larger than one entry per pair of blocks is ever allocated:
    key block before the query block    fully visible if all its subtrees end behind it, partly if any ends inside it
    key block beside the query block    partly visible: each node sees itself


The CPU's tests compare it with `Dense` uncompiled and, forward, compiled; `make gpu-check` compares the kernel.

Shapes: see `treadle.training.attention`; A blocks of queries, B blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from treadle.training.attention.interface import Shape

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key, all indices -> bool

_BLOCK = 128  # queries, and keys, per block

# Kernels are compiled for any lengths, but separately for one block and several, for equal and unequal lengths, for
# windows, for passes with and without gradient, and for precisions.
_VARIANTS = 64


@cache
def _attend(device: str) -> Callable[..., Any]:
    """Return FlexAttention, compiled on GPUs: uncompiled it would allocate all scores at once.

    Past `_VARIANTS` compilations it raises rather than fall back to the uncompiled function.
    """
    if device != "cuda":
        return flex_attention
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


def block_mask(shape: Shape, window: int | None, device: torch.device) -> BlockMask:
    """Return which key blocks each query block sees, fully or partly. Blocks with padding count as partial."""
    depth, subtree_end = shape.depth.numpy(), shape.subtree_end.numpy()
    key_end = _blocks(np.pad(subtree_end, (0, -len(depth) % _BLOCK)))
    first_key = np.arange(len(key_end)) * _BLOCK
    first_query = shape.context + np.arange(0, shape.nodes, _BLOCK)[:, None]
    end_query = first_query + _BLOCK
    some = (first_key < end_query) & (key_end.max(1) > first_query)
    ahead = np.zeros((len(first_query), 1), np.int64)
    if (ends := shape.ahead_with(window)) is not None:
        ahead = _blocks(np.pad(ends.numpy(), (0, -shape.nodes % _BLOCK))).max(1)[:, None]
    every = (first_key + _BLOCK <= first_query + 1) & (key_end.min(1) >= end_query)
    if window is not None:
        key_depth = _blocks(np.pad(depth, (0, -len(depth) % _BLOCK), mode="edge"))
        query_depth = _blocks(np.pad(depth[shape.context :], (0, -shape.nodes % _BLOCK), mode="edge"))
        some &= query_depth.min(1)[:, None] - key_depth.max(1) < window
        every &= query_depth.max(1)[:, None] - key_depth.min(1) < window
    some |= (first_key + _BLOCK > first_query) & (first_key < ahead)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every, device),
        *_ordered(every, device),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_visible(shape, window, device),
        seq_lengths=(shape.nodes, len(depth)),
    )


def _blocks(padded: NDArray[np.int64]) -> NDArray[np.int64]:
    return padded.reshape(-1, _BLOCK)


def _ordered(blocks: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """bool[A, B] -> (int32[1, 1, A], number per row; int32[1, 1, A, B], their indices first, then the others)."""
    count, order = blocks.sum(1), np.argsort(~blocks, axis=1, kind="stable")
    return _int32(count, device), _int32(order, device)


def _int32(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(array)[None, None].to(device, torch.int32)


def _visible(shape: Shape, window: int | None, device: torch.device) -> Mask:
    """Return the elementwise mask. Sizes are tensors because numbers would be compiled in."""
    subtree_end, depth = (x.to(device, torch.int32) for x in (shape.subtree_end, shape.depth))
    context = torch.tensor(shape.context, device=device, dtype=torch.int32)

    def below(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        node = query + context
        return (key <= node) & (node < subtree_end[key])

    reach = torch.tensor(0 if window is None else window, device=device, dtype=torch.int32)

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return below(batch, head, query, key) & (depth[query + context] - depth[key] < reach)

    seen = below if window is None else near
    if (ends := shape.ahead_with(window)) is None:
        return seen
    ahead = ends.to(device, torch.int32)

    def both_ways(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen(batch, head, query, key) | ((key > query + context) & (key < ahead[query]))

    return both_ways


def _capped(softcap: float, like: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    cap = torch.tensor(softcap, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))

    def soft(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return soft


@dataclass(slots=True)
class Flex:
    """Computes tree attention (`Kernel`) by FlexAttention, with one block mask per device and window."""

    shape: Shape
    masks: dict[tuple[torch.device, int | None], BlockMask] = field(default_factory=dict)

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
        place = query.device, window
        if place not in self.masks:
            self.masks[place] = block_mask(self.shape, window, query.device)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        attend, grouped = _attend(query.device.type), query.shape[1] != key.shape[1]
        out = attend(
            q,
            k,
            v,
            score_mod=None if softcap is None else _capped(softcap, query),
            block_mask=self.masks[place],
            scale=scale,
            enable_gqa=grouped,
            return_aux=None if sinks is None else AuxRequest(lse=True),
        )
        if sinks is not None:
            out, statistics = out
            out = (out * torch.sigmoid(statistics.lse - sinks[:, None])[..., None]).to(query.dtype)
        attended: Tensor = out[0].transpose(0, 1)
        return attended
