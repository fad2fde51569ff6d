"""Where the attempts of a group branch (`rollout.forks`).

A group of `training.group_size` attempts has a tree for each `width` of them. The first attempt of each is played from
the beginning; once it has ended, the others go on from one of its steps, which they share:

    RolloutScheduler: first attempts -> fork_of(first) -> Prefix of its branches | None: they begin at step 0, too
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from treadle.algorithms.forks import fork_probabilities
from treadle.core.draws import Stream, call_seed, token_uniforms
from treadle.core.errors import DataError
from treadle.core.types import Status, Trajectory
from treadle.rollout.config import ForksConfig
from treadle.rollout.replay import Prefix
from treadle.rollout.session import Address


def first_place(config: ForksConfig | None, place: int) -> int:
    """Return the place in its group of the first attempt of a tree, given that of any of its attempts."""
    return place if config is None else place - place % config.width


def fork_of(config: ForksConfig, first: Trajectory, address: Address) -> Prefix | None:
    """Return the steps that the branches of an attempt begin with; None if it failed, has no such step, or one that
    cannot be replayed.

    address: of `first`, which keys the draw.
    """
    if first.status is Status.FAILED:
        return None
    if isinstance(config.at, int):
        step, chance = config.at, None
    else:
        chances = fork_probabilities(first.steps, config.at == "entropy")
        seed = call_seed(address.seed, Stream.FORK, address.epoch, address.position, address.attempt, 0)
        drawn = float(token_uniforms(np.array([seed], np.uint64), 0)[0])
        # Rounding of the sum must not draw a step of probability 0.
        step = min(int(np.searchsorted(np.cumsum(chances), drawn, "right")), len(first.steps) - 1)
        chance = float(chances[step]) if step >= 0 else 0.0
    if step >= len(first.steps) or chance == 0:
        return None
    try:
        prefix = Prefix.of(first.trajectory_id, first.steps, step)
    except DataError:
        return None
    return replace(prefix, start=replace(prefix.start, probability=chance))
