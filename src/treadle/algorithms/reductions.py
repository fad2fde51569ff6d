"""Reductions: a weight w per token, known before the forward pass, so that loss = sum_i w_i loss_i.

Contributions of micro-batches (and ranks) then simply add up, and no layout can change a denominator. Untrainable
tokens weigh 0; counts include only trainable tokens and units with at least one. Shapes: mask bool[N]; unit int64[N]:
trajectory, step or group of each token; weights float64[N].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.algorithms.config import AlgorithmConfig
from treadle.packing.flat import Doubles, FlatBatch, Indices


def token_mean(mask: NDArray[np.bool_]) -> Doubles:
    """Return w = 1 / trainable tokens of the update. mask bool[N] -> float64[N].

    Source: Yu et al. 2025, "DAPO", eq. 12.
    """
    return mask / max(int(mask.sum()), 1)


def unit_mean_token_mean(mask: NDArray[np.bool_], unit: Indices) -> Doubles:
    """Return w = 1 / (units * trainable tokens of the token's unit): the mean over units of the mean over their tokens.

    With trajectories as units `trajectory_mean` (Shao et al. 2024, "DeepSeekMath", eq. 3), with steps `step_mean`, with
    groups `task_mean`.
    """
    count = np.bincount(unit[mask], minlength=int(unit.max(initial=-1)) + 1)
    weights: Doubles = mask / (max(int((count > 0).sum()), 1) * np.maximum(count, 1)[unit])
    return weights


def seq_mean_token_sum_norm(mask: NDArray[np.bool_], unit: Indices, length_norm: float) -> Doubles:
    """Return w = 1 / (units * length_norm): the mean over units of token sums divided by a constant.

    unit int64[N]: the trajectory or step (the scope) of each token. Source: Liu et al. 2025, "Dr. GRPO".
    """
    units = len(np.unique(unit[mask]))
    return mask / (max(units, 1) * length_norm)


def token_weights(batch: FlatBatch, config: AlgorithmConfig, mask: NDArray[np.bool_] | None = None) -> Doubles:
    """Return float64[N], the weight of each token under the configured reduction.

    mask bool[N]: trained tokens; default: the batch's own mask.
    """
    mask = batch.mask if mask is None else mask
    match config.reduction:
        case "token_mean":
            return token_mean(mask)
        case "trajectory_mean":
            return unit_mean_token_mean(mask, batch.trajectory_id)
        case "step_mean":
            return unit_mean_token_mean(mask, batch.step_id)
        case "task_mean":
            return unit_mean_token_mean(mask, batch.group_id)
    assert config.length_norm is not None  # validated above
    unit = batch.trajectory_id if config.scope == "trajectory" else batch.step_id
    return seq_mean_token_sum_norm(mask, unit, config.length_norm)
