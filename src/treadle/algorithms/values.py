"""The loss of a value head: pure functions of its values.

Shapes: tensors [n] in, [n] out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """Targets of a value head. old [n]: values at the batch's start. target [n]: returns, `old` + advantage."""

    old: Tensor
    target: Tensor

    def at(self, index: Tensor) -> ValueTargets:
        return ValueTargets(self.old[index], self.target[index])


def value_loss(value: Tensor, targets: ValueTargets, clip: float | None = None) -> Tensor:
    """Return (V - G)^2 / 2; with `clip`, at least the loss of V clipped to within `clip` of the old value.

    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation", eq. 28;
    clipped: Engstrom et al. 2020, "Implementation matters in deep policy gradients", sec. 3.
    """
    error = (value - targets.target).square() / 2
    return error if clip is None else torch.maximum(error, _held_error(value, targets, clip))


def value_clipped(value: Tensor, targets: ValueTargets, clip: float) -> Tensor:
    """Return bool[n]: tokens with a zero gradient in `value_loss`."""
    return _held_error(value, targets, clip) > (value - targets.target).square() / 2


def explained_variance(value: Tensor, target: Tensor) -> float:
    """Return 1 - Var(G - V) / Var(G); 0 if all G are equal. value, target [n], over trained tokens.

    "Equal" allows for rounding: returns are sums of values and advantages, which differ slightly even if every reward
    is 0.
    """
    if not len(target):
        return 0.0
    scale = torch.maximum(target.abs().max(), value.abs().max())
    if bool(target.max() - target.min() <= 1e-5 * scale):
        return 0.0
    return 1 - float((target - value).var(correction=0) / target.var(correction=0))


def _held_error(value: Tensor, targets: ValueTargets, clip: float) -> Tensor:
    held = targets.old + (value - targets.old).clamp(-clip, clip)
    return (held - targets.target).square() / 2
