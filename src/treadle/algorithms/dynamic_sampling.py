"""Dynamic sampling: groups that nothing can be learned from make room for others. Source: Yu et al. 2025, "DAPO"."""

from __future__ import annotations

from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import advantages
from treadle.core.types import Group
from treadle.packing.flat import flatten


def has_zero_advantage(group: Group, config: AlgorithmConfig) -> bool:
    """Whether the advantages of all its trainable tokens are 0; without KL in the reward, which is not known yet.

    Decided on advantages, not on rewards: what has equal rewards but a penalty in one attempt does teach something.
    """
    batch = flatten([group])
    return not advantages(batch, config)[batch.mask].any()
