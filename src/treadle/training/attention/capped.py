"""Flash attention on the CPU with soft-capped scores, c * tanh(score / c), one block of queries at a time.

Shapes: R rectangles, H heads, n queries and m keys of each, D head size; b queries per block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_SCORES = 2**22  # per block


class _Block(NamedTuple):
    """rows: its queries. keys: visible to them. scores [R, H, b, keys]: capped and masked. slope: derivative of capped
    by uncapped scores."""

    rows: slice
    keys: slice
    scores: Tensor
    slope: Tensor


def capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return output [R, H, n, D] and log-sum-exp [R, H, n], in at least float32, as the flash kernel does.

    attn_mask: 0 or -inf, added to the capped scores.
    """
    query, key, value = _wide(query, key, value)
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:-1])
    for block in _blocks(query, key, causal, attn_mask, scale, softcap):
        lse[:, :, block.rows] = block.scores.logsumexp(-1)
        # A row without visible keys has only -inf, which would make its weights NaN.
        total = lse[:, :, block.rows, None].clamp_min(torch.finfo(lse.dtype).min)
        out[:, :, block.rows] = (block.scores - total).exp() @ value[:, :, block.keys]
    return out, lse


def capped_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by query, key and value, in at least float32. out, lse: results of the whole softmax."""
    grad_out, query, key, value, out = _wide(grad_out, query, key, value, out)
    by_query, by_key, by_value = (torch.zeros_like(x) for x in (query, key, value))
    for block in _blocks(query, key, causal, attn_mask, scale, softcap):
        rows, keys = block.rows, block.keys
        weights, upstream = (block.scores - lse[:, :, rows, None]).exp(), grad_out[:, :, rows]
        by_value[:, :, keys] += weights.mT @ upstream
        centered = upstream @ value[:, :, keys].mT - (upstream * out[:, :, rows]).sum(-1, keepdim=True)
        by_score = weights * centered * block.slope * scale
        by_query[:, :, rows] = by_score @ key[:, :, keys]
        by_key[:, :, keys] += by_score.mT @ query[:, :, rows]
    return by_query, by_key, by_value


def _blocks(
    query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float, softcap: float
) -> Iterator[_Block]:
    count, heads, queries, _ = query.shape
    size = max(1, _SCORES // (count * heads * key.shape[2]))
    for first in range(0, queries, size):
        rows = slice(first, min(first + size, queries))
        keys = slice(0, rows.stop if causal else key.shape[2])
        tanh = (scale / softcap * (query[:, :, rows] @ key[:, :, keys].mT)).tanh_()
        scores = softcap * tanh
        if causal:
            scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(first + 1), -torch.inf)
        if mask is not None:
            scores += mask if mask.shape[2] == 1 else mask[:, :, rows]
        yield _Block(rows, keys, scores, 1 - tanh * tanh)


def _wide(*tensors: Tensor) -> Iterator[Tensor]:
    return (x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors)
