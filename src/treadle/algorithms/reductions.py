"""Reductions: a weight w for every token, known before the forward pass, so that loss = sum_i w_i loss_i.

Micro-batches (and ranks) then just add up, and no layout can change a denominator. Untrainable tokens weigh 0;
counts are of trainable tokens and of units that have any.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.packing.flat import Doubles


def token_mean(mask: NDArray[np.bool_]) -> Doubles:
    """w = 1 / trainable tokens of the update. mask bool[N] -> float64[N]. Source: Yu et al. 2025, "DAPO", eq. 12."""
    return mask / max(int(mask.sum()), 1)


def seq_mean_token_sum_norm(mask: NDArray[np.bool_], unit: NDArray[np.int64], length_norm: float) -> Doubles:
    """w = 1 / (units * length_norm): a sum over each unit's tokens divided by a constant, a mean over units.

    unit int64[N]: the trajectory or step (the scope) of each token. Source: Liu et al. 2025, "Dr. GRPO".
    """
    units = len(np.unique(unit[mask]))
    return mask / (max(units, 1) * length_norm)
