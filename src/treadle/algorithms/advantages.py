"""Advantage estimators: rewards of a batch's trajectories -> one advantage a trajectory, in float64.

Shapes: J trajectories. Every step of a trajectory gets its trajectory's advantage, under the step's own mask.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.packing.flat import Doubles

_EPSILON = 1e-6


def grpo(rewards: Doubles, group: NDArray[np.int64], norm_by_std: bool = True) -> Doubles:
    """Group-relative advantage: A_i = (R_i - mean) / (std + 1e-6) over i's group, std unbiased.

    rewards float64[J], group int64[J]; both hold graded trajectories only. Returns float64[J].
    A group of one, or with equal rewards, gets exactly 0. `norm_by_std=False` leaves the division out.
    Source: Shao et al. 2024, "DeepSeekMath", eq. 10-12; without std: Liu et al. 2025, "Dr. GRPO".
    """
    advantages = np.zeros(len(rewards))
    for members in (np.flatnonzero(group == g) for g in np.unique(group)):
        own = rewards[members]
        if own.min() == own.max():
            continue
        centred = own - own.mean()
        advantages[members] = centred / (own.std(ddof=1) + _EPSILON) if norm_by_std else centred
    return advantages
