"""Dynamic sampling: groups without any learning signal make room for others. Source: Yu et al. 2025, "DAPO"."""

from __future__ import annotations

from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import advantages
from treadle.core.types import Group
from treadle.packing.flat import flatten


def has_zero_advantage(group: Group, config: AlgorithmConfig) -> bool:
    """Return whether the advantages of all trainable tokens of the group are 0.

    KL in the reward is left out: it is not known yet. The test is of advantages, not of rewards: a group with equal
    rewards but a penalty in one attempt does teach something.
    """
    batch = flatten([group])
    return not advantages(batch, config)[batch.mask].any()
