"""Sums over units (trajectories or steps) of flat token arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def unit_sum(values: Tensor, mask: Tensor, unit: Tensor) -> Tensor:
    """Return the sum over the trainable tokens of each token's unit. values, mask, unit [N] -> [N]."""
    units = int(unit.max()) + 1 if len(unit) else 0
    return values.new_zeros(units).index_add(0, unit, values.where(mask, 0.0))[unit]


def unit_mean(values: Tensor, mask: Tensor, unit: Tensor) -> Tensor:
    """Return `unit_sum` divided by the unit's number of trainable tokens, [N]; 0 for a unit without any."""
    return unit_sum(values, mask, unit) / unit_sum(values.new_ones(len(values)), mask, unit).clamp(min=1)
