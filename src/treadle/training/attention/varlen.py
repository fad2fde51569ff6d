"""Tree attention on GPUs by stock variable-length FlashAttention, in half precision.

A *stretch* is a sequence of nodes, each the parent of the next: a path from some node down to a leaf. It and everything
above it form one sequence, with the stretch's queries at the end:

    a   b   c   d   e   f   g           stretches: abcde, fg (under abc)
                                        queries abcde over keys abcde, fg over abcfg, causal, aligned at the end

So keys and values are gathered along each stretch's path: memory as for the unpacked sequences, but as few scores as
the tree has. With a sliding window, only the part of the path within its reach is gathered.

The CPU's tests replace the kernel by FlashAttention's definition; `make gpu-check` compares the kernel with `Dense`.

Shapes: see `treadle.training.attention`; S stretches, G gathered keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from treadle.core.errors import ConfigError
from treadle.packing.flat import Indices
from treadle.training.attention.interface import Shape


@dataclass(frozen=True, slots=True)
class Paths:
    """S concatenated sequences: for each stretch its queries, and the keys on its path.

    index int64[G]: indices of the gathered keys; None if each occurs once, in order.
    queries, keys int32[S + 1]: sequence s has queries [queries[s], queries[s + 1]), and gathered keys likewise.
    most_queries, most_keys: maximum per sequence.
    """

    index: Tensor | None
    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


def paths(shape: Shape, window: int | None, device: torch.device) -> Paths:
    """Return the sequences that together make up the attention."""
    depth = shape.depth.numpy()
    starts, ends = stretches(shape)
    reached = _reached(shape, window)
    # Depth -> key, from the root to the newest one; initially the context.
    path = np.arange(depth.max() + 1)
    parts = []
    for start, end, first in zip(starts.tolist(), ends.tolist(), reached.tolist(), strict=True):
        bottom = depth[end - 1] + 1
        path[depth[start] : bottom] = np.arange(start, end)
        parts.append(path[first:bottom].copy())
    index, widths = np.concatenate(parts), np.array([len(part) for part in parts])
    return Paths(
        None if np.array_equal(index, np.arange(len(depth))) else torch.from_numpy(index).to(device),
        _bounds(ends - starts).to(device),
        _bounds(widths).to(device),
        int((ends - starts).max()),
        int(widths.max()),
    )


def stretches(shape: Shape) -> tuple[Indices, Indices]:
    """Return (starts, ends) int64[S] of the nodes' stretches, as indices of keys."""
    depth = shape.depth.numpy()[shape.context :]
    starts = np.concatenate([[0], np.flatnonzero(depth[1:] != depth[:-1] + 1) + 1])
    return starts + shape.context, np.append(starts[1:], len(depth)) + shape.context


def gathered(shape: Shape, window: int | None) -> int:
    """Return G, the number of gathered keys."""
    _, ends = stretches(shape)
    return int((shape.depth.numpy()[ends - 1] + 1 - _reached(shape, window)).sum())


def _reached(shape: Shape, window: int | None) -> Indices:
    """Return int64[S]: the smallest depth that a stretch's first query sees."""
    starts, _ = stretches(shape)
    top = shape.depth.numpy()[starts]
    return np.zeros_like(top) if window is None else np.maximum(top - window + 1, 0)


def _bounds(lengths: Indices) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _flash(*args: Any, **options: Any) -> Tensor:
    # Newer than the oldest PyTorch that trains on a CPU.
    from torch.nn.attention.varlen import varlen_attn

    # Before PyTorch 2.12, which always allows it.
    if "enable_gqa" not in signature(varlen_attn).parameters:
        del options["enable_gqa"]
    return cast(Tensor, varlen_attn(*args, **options))


@dataclass(slots=True)
class Varlen:
    """Computes tree attention (`Kernel`) by variable-length FlashAttention, with one plan per device and window.

    attend: function with the signature of `varlen_attn`.
    """

    shape: Shape
    attend: Callable[..., Tensor] = _flash
    plans: dict[tuple[torch.device, int | None], Paths] = field(default_factory=dict)

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
        if sinks is not None or softcap is not None:
            raise ConfigError("variable-length FlashAttention has neither sinks nor soft caps; use FlexAttention")
        place = query.device, window
        if place not in self.plans:
            self.plans[place] = paths(self.shape, window, query.device)
        plan = self.plans[place]
        return self.attend(
            query,
            _gather(key, plan.index),
            _gather(value, plan.index),
            plan.queries,
            plan.keys,
            plan.most_queries,
            plan.most_keys,
            scale=scale,
            # Keys before a query's own, keys after it.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
        )


def _gather(rows: Tensor, index: Tensor | None) -> Tensor:
    if index is None:
        return rows
    out: Tensor = _Gather.apply(rows, index)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    """rows [C + T, K, D] -> [G, K, D]. The stock gradient would sum shared keys in half precision."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (index,), (gradient,) = ctx.saved_tensors, grad_outputs
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        total = wide.new_zeros(ctx.count, *wide.shape[1:]).index_add_(0, index, wide)
        return total.to(gradient.dtype), None
