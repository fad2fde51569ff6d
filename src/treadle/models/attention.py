"""Explicit attention weights, for features that fused kernels lack: sinks and soft caps.

Shapes: H heads, C queries, L keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention_weights(scores: Tensor, visible: Tensor, sinks: Tensor | None, softcap: float | None) -> Tensor:
    """Return the softmax of scores [..., C, L] over the visible keys, in at least float32. Overwrites the scores.

    sinks [..., 1]: score of an additional key without a value; the weights then sum to less than 1. softcap: c of
    c * tanh(score / c).
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill_(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights if sinks is None else weights[..., :-1]
