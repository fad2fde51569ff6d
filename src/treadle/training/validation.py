"""Combinations of the `algorithm` and `training` sections that mean nothing. Needs no torch."""

from __future__ import annotations

from treadle.algorithms import estimators
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.validation import check
from treadle.core.errors import ConfigError
from treadle.training.config import TrainingConfig


def check_algorithm(algorithm: AlgorithmConfig, training: TrainingConfig, filtered_sampling: bool = False) -> None:
    """Raise ConfigError for an algorithm that means nothing, or nothing in this training."""
    check(algorithm, filtered_sampling)
    name, advantage = algorithm.advantage, estimators.by_name(algorithm.advantage)
    if training.group_size == 1 and advantage.by_group:
        raise ConfigError(
            f"training.group_size is 1, but algorithm.advantage {name!r} compares the trajectories of a group; "
            "raise it to 2 or more, or choose reinforce++"
        )
