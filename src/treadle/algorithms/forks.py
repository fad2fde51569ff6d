"""Attempts that branch from a sibling's step: where they may, and their advantages.

A tree is a first attempt and those that branch from it, w in all. For example, of w = 3, forked at step 2:

    first    0 -- 1 -+- 2 -- 3
    branch           +- 2 -- 3 -- 4
    branch           +- 2

Steps 0 and 1 are trained once, in the first attempt, and stand for all three. Shapes: J graded attempts, S trained
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from treadle.algorithms.advantages import unequal_groups
from treadle.core.types import Step, Trajectory
from treadle.packing.flat import Doubles, FlatBatch, Indices


def fork_probabilities(steps: Sequence[Step], by_entropy: bool) -> Doubles:
    """Return the probability of a fork at each step of an attempt, float64[len(steps)].

    The first step is no fork: a branch there would be another first attempt. All others are equally likely; or, by
    entropy, half of that and half in proportion to a step's mean surprisal -log p, which estimates the entropy of its
    tokens. So no step's probability is below half of 1 / (steps - 1).
    """
    found, later = np.zeros(len(steps)), len(steps) - 1
    if later < 1:
        return found
    found[1:] = 1 / later
    surprisal = np.array([-float(step.logprobs.mean()) if len(step.logprobs) else 0.0 for step in steps[1:]])
    if by_entropy and surprisal.sum() > 0:
        found[1:] = (found[1:] + surprisal / surprisal.sum()) / 2
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Forks:
    """How the attempts of a batch share steps.

    first   int64[J]    the first attempt of each one's tree: itself, or the sibling that it branches from
    at      int64[J]    the step at which it does; 0: at the beginning, because that sibling had no step to fork
    chance  float64[J]  probability with which that step was drawn; nan: it was set beforehand
    steps   int64[J]    recorded steps
    """

    first: Indices
    at: Indices
    chance: Doubles
    steps: Indices

    @classmethod
    def of(cls, batch: FlatBatch) -> Forks:
        """Read them off `Trajectory.start`; one in another group, or in no trained attempt, is no fork."""
        places = {(g, t.trajectory_id): j for j, (t, g) in enumerate(_attempts(batch))}
        count = len(batch.trajectories)
        first, at, chance = np.arange(count), np.zeros(count, np.int64), np.full(count, np.nan)
        for j, (t, group) in enumerate(_attempts(batch)):
            if t.start is not None and (sibling := places.get((group, t.start.source))) is not None:
                first[j], at[j] = sibling, t.start.steps
                chance[j] = np.nan if t.start.probability is None else t.start.probability
        return cls(first, at, chance, np.array([len(t.steps) for t in batch.trajectories], np.int64))


def forked(
    rewards: Doubles,
    group: Indices,
    forks: Forks,
    trajectory_of_step: Indices,
    number: Indices,
    baseline: Literal["fork", "tree"],
) -> Doubles:
    """Return the advantage of each trained step, a weight times a return less a baseline: float64[S].

    rewards float64[J], group int64[J]; trajectory_of_step, number int64[S]: the step's attempt, and its number there.

    Weights. Let c_t = 1 / max(L, t), with L the mean number of steps to fork at in the group's other trees. A branch
    from a step drawn with probability q weighs c_t / q at its step t, and its first attempt 1 + (1 - t c_t) for each
    branch. Each of the t forks up to step t is drawn with its q, so that a branch weighs t c_t on average, and the tree
    w at every step. With a step that was set beforehand, a branch weighs 1, and the first attempt w before it and 1
    from it on. One that begins at 0, as there was no step to fork at, weighs 1, too, beside a first attempt with w.

    Returns. Before the fork the first attempt's R takes part in those of its branches, R + sum_b weight_b (R_b - R) / w
    with their weights at the fork, where R_b - R is 0 on average. If the step was set beforehand it is their mean.

    Baselines, on which no token has an influence. `tree`: the mean return of the group's other trees. `fork`: for a
    branch, that of the others at its fork, with the first attempt; for a first attempt, the one of `tree`, as where
    it is forked may depend on its own later steps. Without another tree that is missing, and the advantage 0. A group
    with equal returns gets exactly 0.
    """
    advantages = np.zeros(len(number))
    start = np.searchsorted(trajectory_of_step, np.arange(len(rewards) + 1))
    for members in unequal_groups(rewards, group):
        for first in np.unique(forks.first[members]):
            inside = forks.first[members] == first
            tree, others = members[inside], members[~inside]
            outside = rewards[others].mean() if len(others) else None
            longest = (forks.steps[np.unique(forks.first[others])] - 1).mean() if len(others) else 0.0
            own = slice(start[first], start[first + 1])
            weight, value = np.ones(own.stop - own.start), np.full(own.stop - own.start, rewards[first])
            for branch in tree[tree != first]:
                fork, chance = int(forks.at[branch]), float(forks.chance[branch])
                steps = slice(start[branch], start[branch + 1])
                weight += 1 - _expected_weight(number[own], fork, chance, longest)
                gain = _weight(np.array([fork]), fork, chance, longest)[0] * (rewards[branch] - rewards[first])
                value += np.where(number[own] < fork, gain / len(tree), 0.0)
                beside = tree[(forks.at[tree] == fork) | (tree == first)]
                compared = outside if baseline == "tree" else rewards[beside[beside != branch]].mean()
                if compared is not None:
                    weights = _weight(number[steps], fork, chance, longest)
                    advantages[steps] = weights * (rewards[branch] - compared)
            if outside is not None:
                advantages[own] = weight * (value - outside)
    return advantages


def _weight(t: Indices, fork: int, chance: float, longest: float) -> Doubles:
    """Return the weight of a branch at its steps t, float64[n]. chance: nan: the step was set beforehand."""
    return np.ones(len(t)) if fork == 0 or np.isnan(chance) else 1 / np.maximum(longest, t) / chance


def _expected_weight(t: Indices, fork: int, chance: float, longest: float) -> Doubles:
    """Return the mean of that weight over forks and continuations, of a first attempt that reaches t, float64[n]."""
    if fork == 0:
        return np.zeros(len(t))
    return np.where(t >= fork, 1.0, 0.0) if np.isnan(chance) else t / np.maximum(np.maximum(longest, t), 1)


def _attempts(batch: FlatBatch) -> zip[tuple[Trajectory, int]]:
    return zip(batch.trajectories, batch.group_of_trajectory.tolist(), strict=True)
