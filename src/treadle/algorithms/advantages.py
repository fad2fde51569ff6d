"""Advantage estimators: pure functions from rewards to advantages, in float64.

Shapes: J graded trajectories, S steps, N completion tokens, all in canonical order. Ids map each to its owner:
trajectory_of_step int64[S], group int64[J]. Packing does not matter here; masks are per step.

A group whose returns are all equal gets exactly 0 from the estimators with a group baseline, and so does a group of
one. (Rounding alone would not: in float32, eight rewards of 0.7 have an advantage of 0.056 each.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import DataError
from treadle.packing.flat import Doubles, Indices

_EPSILON = 1e-6


def grpo(rewards: Doubles, group: Indices, norm_by_std: bool = True) -> Doubles:
    """Return the group-relative advantage A_i = (R_i - mean) / (std + 1e-6) over i's group, std unbiased.

    rewards float64[J], group int64[J]; both hold graded trajectories only. Returns float64[J].
    A group of one, or with equal rewards, gets exactly 0. `norm_by_std=False` skips the division.
    Source: Shao et al. 2024, "DeepSeekMath", eq. 10-12; without std: Liu et al. 2025, "Dr. GRPO".
    """
    advantages = np.zeros(len(rewards))
    for members in unequal_groups(rewards, group):
        centered = rewards[members] - rewards[members].mean()
        advantages[members] = centered / (rewards[members].std(ddof=1) + _EPSILON) if norm_by_std else centered
    return advantages


def rloo(rewards: Doubles, group: Indices) -> Doubles:
    """Return the leave-one-out advantage A_i = R_i - mean of the other rewards in i's group.

    rewards float64[J], group int64[J]; returns float64[J]. A group of one, or with equal rewards, gets exactly 0.
    Source: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; for language models: Ahmadian et al.
    2024, "Back to basics".
    """
    advantages = np.zeros(len(rewards))
    for members in unequal_groups(rewards, group):
        centered = rewards[members] - rewards[members].mean()
        advantages[members] = centered * len(members) / (len(members) - 1)
    return advantages


def maxrl(rewards: Doubles, group: Indices) -> Doubles:
    """Return A_i = (R_i - mean) / mean over i's group; 0 where all rewards are equal.

    rewards float64[J], group int64[J]; returns float64[J].
    For rewards of 0 and 1 this is the gradient of log pass rate, up to the order that the group's size allows.
    Raises DataError for a negative reward, because the mean is then no scale. Source: Tajwar et al. 2026, "Maximum
    likelihood reinforcement learning".
    """
    if (rewards < 0).any():
        raise DataError(f"advantage maxrl needs rewards >= 0, got {rewards.min()}; choose grpo or rloo")
    advantages = np.zeros(len(rewards))
    for members in unequal_groups(rewards, group):
        mean = rewards[members].mean()
        advantages[members] = (rewards[members] - mean) / mean
    return advantages


def step_return(
    rewards: Doubles, step_rewards: Doubles, trajectory_of_step: Indices, group: Indices, gamma: float
) -> Doubles:
    """Return a step's return-to-go less the mean return-to-go of the group's other trajectories at the same step.

    G_t = sum_{k >= t} gamma^(k-t) r_k. A_t = G_t - mean of G_t over the group's other trajectories that reached step t.
    If none did, their returns from the start less this trajectory's own rewards so far serve as the baseline:
    A_t = G_t - (mean of others' G_0 - sum_{k < t} gamma^k r_k) = (1 - gamma^t) G_t + (G_0 - mean of others' G_0).
    Baselines depend only on other trajectories or the past, so they do not bias the gradient.

    rewards float64[J]: G_0 of a trajectory without steps. step_rewards float64[S]. Returns float64[S].
    A group of one gets 0. Source: policy gradient theorem with a leave-one-out baseline, applied per step.
    """
    togo = returns(step_rewards, trajectory_of_step, gamma)
    advantages = np.zeros(len(togo))
    start = np.searchsorted(trajectory_of_step, np.arange(len(rewards) + 1))
    count = np.diff(start)
    first = np.array([togo[start[j]] if count[j] else rewards[j] for j in range(len(rewards))], np.float64)
    whole = rloo(first, group)
    for members in _groups(group):
        if len(members) == 1:
            continue
        for t in range(count[members].max()):
            there = members[count[members] > t]
            steps = start[there] + t
            if len(there) > 1 and t > 0:
                advantages[steps] = rloo(togo[steps], np.zeros(len(there), np.int64))
            else:
                advantages[steps] = (1 - gamma**t) * togo[steps] + whole[there]
    return advantages


def gigpo(
    rewards: Doubles,
    step_rewards: Doubles,
    trajectory_of_step: Indices,
    group: Indices,
    state: Indices,
    gamma: float,
    weight: float,
    norm_by_std: bool = True,
) -> Doubles:
    """Return the group-in-group advantage A_t = episode advantage + weight * step advantage.

    The episode advantage is `grpo` of R over the group; the step advantage is `grpo` of the return-to-go G_t over the
    steps that share a state. state int64[S]: equal for steps of one group in the same state of the environment.
    rewards float64[J], step_rewards float64[S]; returns float64[S].
    Source: Feng et al. 2025, "Group-in-group policy optimization for LLM agent training".
    """
    episode = grpo(rewards, group, norm_by_std)[trajectory_of_step]
    return episode + weight * grpo(returns(step_rewards, trajectory_of_step, gamma), state, norm_by_std)


def reinforce_plus_plus(
    token_rewards: Doubles, mask: NDArray[np.bool_], trajectory: Indices, gamma: float, source: Indices | None = None
) -> Doubles:
    """Return the discounted return-to-go of each trainable token, whitened over all trainable tokens of the update.

    token_rewards float64[N] (see `paid_to_tokens`), mask bool[N], trajectory int64[N]. Returns float64[N], 0 elsewhere.
    The discount counts trainable tokens only, across the steps of a trajectory. source int64[N]: token from which each
    token takes its return, itself by default; the reward of a token with another source is added to that source.
    Source: Hu 2025, "REINFORCE++".
    """
    itself = np.arange(len(mask))
    source = itself if source is None else source
    main = mask & (source == itself)
    togo, advantages = np.zeros(len(mask)), np.zeros(len(mask))
    togo[main] = returns(np.bincount(source, token_rewards, len(mask))[main], trajectory[main], gamma)
    advantages[mask] = whiten(togo[source[mask]])
    return advantages


def reinforce_plus_plus_baseline(
    rewards: Doubles, group: Indices, mask: NDArray[np.bool_], trajectory: Indices
) -> Doubles:
    """Return R less the group's mean on each trainable token, whitened over the trainable tokens of the update.

    rewards float64[J], group int64[J], mask bool[N], trajectory int64[N]. Returns float64[N].
    A group with equal rewards gets exactly 0 and is excluded from mean and standard deviation: whitening would give it
    an advantage. Source: Hu 2025, "REINFORCE++", the baseline variant with several samples per prompt.
    """
    centered, informative = np.zeros(len(rewards)), np.zeros(len(rewards), np.bool_)
    for members in unequal_groups(rewards, group):
        centered[members] = rewards[members] - rewards[members].mean()
        informative[members] = True
    used = mask & informative[trajectory]
    advantages = np.zeros(len(mask))
    advantages[used] = whiten(centered[trajectory[used]])
    return advantages


def gae(
    token_rewards: Doubles,
    values: Doubles,
    mask: NDArray[np.bool_],
    trajectory: Indices,
    gamma: float,
    gae_lambda: float,
) -> Doubles:
    """Return generalized advantage estimates over a trajectory's trainable tokens, across its steps.

    delta_i = r_i + gamma V_{i+1} - V_i, A_i = sum_l (gamma lambda)^l delta_{i+l}; V is 0 after the last one.
    Observations between steps are no actions: they are skipped and not discounted. A value head learns A + V.
    token_rewards, values float64[N], mask bool[N], trajectory int64[N]. Returns float64[N], 0 elsewhere.
    Source: Schulman et al. 2015, "High-dimensional continuous control using generalized advantage estimation", eq. 16.
    """
    advantages = np.zeros(len(mask))
    value, owner = values[mask], trajectory[mask]
    after = np.append(value[1:], 0.0)
    after[_is_last(owner)] = 0.0
    deltas = token_rewards[mask] + gamma * after - value
    advantages[mask] = returns(deltas, owner, gamma * gae_lambda)
    return advantages


# Building blocks


def returns(rewards: Doubles, owner: Indices, gamma: float) -> Doubles:
    """Return G_i = r_i + gamma G_{i+1} within each run of equal owners.

    rewards float64[n], owner int64[n]; returns float64[n].
    """
    totals = np.zeros(len(rewards))
    running = 0.0
    for i, (reward, last) in reversed(list(enumerate(zip(rewards.tolist(), _is_last(owner).tolist(), strict=True)))):
        running = reward + (0.0 if last else gamma * running)
        totals[i] = running
    return totals


def whiten(values: Doubles) -> Doubles:
    """Return (x - mean) / (std + 1e-6), std unbiased; exactly 0 where all are equal. float64[n] -> float64[n]."""
    return grpo(values, np.zeros(len(values), np.int64))


def paid_to_tokens(
    step_rewards: Doubles, trajectory_of_step: Indices, step: Indices, mask: NDArray[np.bool_]
) -> Doubles:
    """Return float64[N] with each step's reward on its last trainable token.

    step_rewards float64[S], trajectory_of_step int64[S], step int64[N], mask bool[N]. The reward of a step without
    trainable tokens (greedy, masked) moves to the trajectory's last trainable token before it; it is dropped if there
    is none, because no trainable token earned it.
    """
    paid = np.zeros(len(mask))
    trained = np.flatnonzero(mask)
    last = np.searchsorted(step[trained], np.arange(len(step_rewards)), side="right") - 1
    earned = last >= 0
    earned[earned] = trajectory_of_step[step[trained[last[earned]]]] == trajectory_of_step[earned]
    np.add.at(paid, trained[last[earned]], step_rewards[earned])
    return paid


def moved_to_trainable(token_rewards: Doubles, trajectory: Indices, mask: NDArray[np.bool_]) -> Doubles:
    """Move each token's reward to the last trainable token at or before it, like `paid_to_tokens` for steps.

    token_rewards float64[N], trajectory int64[N], mask bool[N]; returns float64[N]. An untrainable token (masked, the
    tail of a stop string) is a consequence of earlier samples: the trainable token there earned its reward.
    """
    moved = np.zeros(len(mask))
    at = np.maximum.accumulate(np.where(mask, np.arange(len(mask)), -1))
    earned = at >= 0
    earned[earned] = trajectory[at[earned]] == trajectory[earned]
    np.add.at(moved, at[earned], token_rewards[earned])
    return moved


def _is_last(owner: Indices) -> NDArray[np.bool_]:
    """Return bool[n]: whether each element is the last in its run of equal owners."""
    last = np.ones(len(owner), np.bool_)
    last[:-1] = owner[1:] != owner[:-1]
    return last


def _groups(group: Indices) -> Iterator[Indices]:
    order = np.argsort(group, kind="stable")
    yield from (part for part in np.split(order, np.flatnonzero(np.diff(group[order])) + 1) if len(part))


def unequal_groups(values: Doubles, group: Indices) -> Iterator[Indices]:
    """Yield the members of each group with unequal values; a group of one has equal values."""
    yield from (members for members in _groups(group) if values[members].min() < values[members].max())
