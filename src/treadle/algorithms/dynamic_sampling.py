"""Dynamic sampling: groups that nothing can be learned from make room for others. Source: Yu et al. 2025, "DAPO"."""

from __future__ import annotations

from dataclasses import replace

from treadle.algorithms.config import AlgorithmConfig, advantages
from treadle.core.types import DropReason, Group
from treadle.packing.flat import flatten


def learns_nothing(group: Group, config: AlgorithmConfig) -> bool:
    """Whether the advantages of all its trainable tokens are 0; without KL in the reward, which is not known yet.

    Decided on advantages, not on rewards: what has equal rewards but a penalty in one attempt does teach something.
    """
    batch = flatten([group])
    return not advantages(batch, config)[batch.mask].any()


def without_steps(group: Group) -> Group:
    """The group with all of its steps dropped as filtered. Its weight goes to the other groups of the update."""
    filtered = (
        replace(t, steps=tuple(replace(s, dropped=s.dropped or DropReason.FILTERED) for s in t.steps))
        for t in group.trajectories
    )
    return replace(group, trajectories=tuple(filtered))
