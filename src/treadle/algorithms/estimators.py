"""Registered advantages: the formulas of `advantages.py`, applied to a batch with their options.

    FlatBatch, Signals -Rewards-> trajectory [J], step [K], token [N] -estimator-> advantage [N]

Shapes: J graded trajectories, K played steps, N trained completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from treadle.algorithms.advantages import (
    gae,
    gigpo,
    grpo,
    maxrl,
    moved_to_trainable,
    paid_to_tokens,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    step_return,
)
from treadle.algorithms.config import (
    AlgorithmConfig,
    DiscountConfig,
    ForksConfig,
    GaeConfig,
    GigpoConfig,
    NormConfig,
    StepReturnConfig,
)
from treadle.algorithms.forks import Forks, forked
from treadle.core.config import Config
from treadle.core.errors import ConfigError
from treadle.core.outcomes import by_role
from treadle.core.registry import NoOptions, build_options, resolve
from treadle.core.types import BreakCause, Group
from treadle.core.user_functions import Expected, call, check_function, not_finite
from treadle.packing.breaks import parent_steps
from treadle.packing.flat import Doubles, FlatBatch, Indices, flatten


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """Inputs of an estimator beside the batch.

    penalty float64[N]: subtracted from each token's reward (KL in the reward). values float64[N]: output of the value
    head. credit float64[K]: added to each played step's reward (`distillation.turn_credit`).
    """

    penalty: Doubles | None = None
    values: Doubles | None = None
    credit: Doubles | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Rewards:
    """The same rewards at three levels: trajectory float64[J], step float64[K], token float64[N].

    Step rewards of a trajectory sum to its own. `token` has the rewards given to single tokens, plus the rest of each
    step's reward on its last trainable token. Rewards of untrainable tokens and steps go to the trajectory's last
    trainable token before them, if any.
    """

    trajectory: Doubles
    step: Doubles
    token: Doubles

    @classmethod
    def of(cls, batch: FlatBatch, signals: Signals) -> Rewards:
        """Return the environment's rewards, with the credit of steps, less the penalty of trainable tokens."""
        trajectory, step = batch.rewards, batch.played_rewards
        if signals.credit is not None:
            trajectory = trajectory + np.bincount(batch.trajectory_of_played, signals.credit, len(trajectory))
            step = step + signals.credit
        rest = step - np.bincount(batch.played_id, batch.token_rewards, len(batch.played))
        paid = paid_to_tokens(rest, batch.trajectory_of_played, batch.played_id, batch.mask)
        paid += moved_to_trainable(batch.token_rewards, batch.trajectory_id, batch.mask)
        if signals.penalty is None:
            return cls(trajectory, step, paid)
        subtracted = np.where(batch.mask, signals.penalty, 0.0)
        return cls(
            trajectory - np.bincount(batch.trajectory_id, subtracted, len(batch.trajectories)),
            step - np.bincount(batch.played_id, subtracted, len(batch.played)),
            paid - subtracted,
        )


Estimator = Callable[[FlatBatch, Signals, Any], Doubles]


@dataclass(frozen=True, slots=True)
class Advantage:
    """A registered advantage estimator (entry points `treadle.advantages`).

    per_token: (batch, signals, options) -> advantage float64[N]; values at untrainable tokens have no effect; J, K and
    N may be 0.
    options_type: type of `options`, built from a recipe's `algorithm.advantage_options`.
    needs_values: uses `Signals.values`. The value head learns values + advantage, so do not whiten the advantage.
    by_group: compares attempts within a group, so that a group of one trains nothing.
    by_step, by_token: uses rewards of single steps or tokens; otherwise only a trajectory's sum.
    by_fork: knows that attempts may branch from a sibling's step (`rollout.forks`), and are then not independent.
    """

    per_token: Estimator
    options_type: type[Config] = NoOptions
    needs_values: bool = False
    by_group: bool = True
    by_step: bool = False
    by_token: bool = False
    by_fork: bool = False


ADVANTAGE_FUNCTION = Expected(
    "    def advantage(batch, signals, options):\n        return batch.rewards[batch.trajectory_id]",
    "the advantage of each token: a floating-point array of shape [len(batch)], finite where batch.mask is true",
)


@cache
def by_name(name: str) -> Advantage:
    """Return the advantage of a registered name or module:attribute. Raises ConfigError."""
    advantage, where = resolve("advantages", name, "algorithm.advantage"), f"algorithm.advantage: {name!r}"
    if not isinstance(advantage, Advantage):
        raise ConfigError(
            f"{where} is of type {type(advantage).__name__}; make it an `Advantage`: MINE = Advantage(advantage), "
            f"with\n{ADVANTAGE_FUNCTION.example}"
        )
    check_function(advantage.per_token, where, ADVANTAGE_FUNCTION)
    return advantage


def options_of(config: AlgorithmConfig) -> Config:
    options_type = by_name(config.advantage).options_type
    return build_options(options_type, config.advantage_options, "algorithm.advantage_options", config.advantage)


def needs_group(config: AlgorithmConfig) -> bool:
    """Return whether attempts are compared with each other, so that a group of one trains nothing."""
    return by_name(config.advantage).by_group and (config.distillation is None or config.distillation.rewards > 0)


def advantages(batch: FlatBatch, config: AlgorithmConfig, signals: Signals | None = None) -> Doubles:
    """Return float64[N], the advantage of each token, by the configured estimator.

    Raises ConfigError unless the result is one floating-point number per token, finite for each trainable one.
    """
    estimate, where = by_name(config.advantage).per_token, f"algorithm.advantage: {config.advantage!r}"
    advantage = call(estimate, where, ADVANTAGE_FUNCTION, batch, signals or Signals(), options_of(config))
    if (
        not isinstance(advantage, np.ndarray)
        or advantage.shape != (len(batch),)
        or not np.issubdtype(advantage.dtype, np.floating)
    ):
        wrong = f"for {len(batch)} tokens"
    else:
        wrong = not_finite(advantage, batch.mask)
    if wrong:
        raise ConfigError(f"{where}: {ADVANTAGE_FUNCTION.refusal(estimate, advantage, wrong)}")
    return advantage


def state_ids(batch: FlatBatch) -> Indices:
    """Return int64[K], the number of the state at each played step; equal states of one group share a number.

    States are compared by the environment's key or, if it gave none (before its first answer, or never), by the step's
    prompt, token for token.
    """
    groups = batch.group_of_trajectory[batch.trajectory_of_played]
    numbers: dict[tuple[int, str | bytes], int] = {}
    keys = ((int(g), step.state_key or step.prompt_ids.tobytes()) for g, step in zip(groups, batch.played, strict=True))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def _by_trajectory(estimate: Callable[[Doubles, Indices, Any], Doubles]) -> Estimator:
    """Turn a per-trajectory estimator into a per-token one: each token gets its trajectory's advantage."""

    def per_token(batch: FlatBatch, signals: Signals, options: Config) -> Doubles:
        rewards = Rewards.of(batch, signals).trajectory
        return estimate(rewards, batch.group_of_trajectory, options)[batch.trajectory_id]

    return per_token


def _by_main_step(estimate: Callable[[Rewards, FlatBatch, Indices, Any], Doubles]) -> Estimator:
    """Turn an estimator of the main branch's M steps into a per-token one.

    estimate: (rewards, with `step` of these M only; batch; their indices int64[M] among the played steps; options) ->
    advantage float64[M].
    It sees all played steps, so that a step's return and its baseline do not depend on which of them are trained.
    Rewards of a sub-agent's steps are added to the step that called it, and the sub-agent's tokens take that step's
    advantage.
    """

    def per_token(batch: FlatBatch, signals: Signals, options: Config) -> Doubles:
        rewards, caller = Rewards.of(batch, signals), parent_steps(batch)
        main = np.flatnonzero(caller == np.arange(len(caller)))
        paid = np.asarray(np.bincount(caller, rewards.step, len(caller))[main], np.float64)
        advantage = estimate(replace(rewards, step=paid), batch, main, options)
        return advantage[np.searchsorted(main, caller)][batch.played_id]

    return per_token


def segments(batch: FlatBatch, main: Indices) -> Indices:
    """Return int64[M], the segment of each main step, numbered through the batch.

    A segment opens at a trajectory's first step and at each step that continues from a summary (`break_cause:
    summary`); a summary thus belongs to the segment it ends. main int64[M]: steps of the main branches, see
    `_by_main_step`.
    """
    owner = batch.trajectory_of_played[main]
    opens = np.array([batch.played[k].break_cause is BreakCause.SUMMARY for k in main], np.bool_)
    opens[1:] |= owner[1:] != owner[:-1]
    opens[:1] = False
    return np.cumsum(opens)


def _step_return(rewards: Rewards, batch: FlatBatch, main: Indices, options: StepReturnConfig) -> Doubles:
    unit = np.arange(len(main)) if options.scope == "step" else segments(batch, main)
    paid = np.bincount(unit, rewards.step).astype(np.float64)
    owner = batch.trajectory_of_played[main][np.searchsorted(unit, np.arange(len(paid)))]
    return step_return(rewards.trajectory, paid, owner, batch.group_of_trajectory, options.gamma)[unit]


def _gigpo(rewards: Rewards, batch: FlatBatch, main: Indices, options: GigpoConfig) -> Doubles:
    return gigpo(
        rewards.trajectory,
        rewards.step,
        batch.trajectory_of_played[main],
        batch.group_of_trajectory,
        state_ids(batch)[main],
        options.gamma,
        options.weight,
        options.norm_by_std,
    )


def _forks(batch: FlatBatch, signals: Signals, options: ForksConfig) -> Doubles:
    rewards, number = Rewards.of(batch, signals).trajectory, np.array(batch.step_number, np.int64)
    owner, group = batch.trajectory_of_step, batch.group_of_trajectory
    return forked(rewards, group, Forks.of(batch), owner, number, options.baseline)[batch.step_id]


def parent_tokens(batch: FlatBatch) -> Indices:
    """Return int64[N], the token from which each token takes its return.

    That is the token itself, except for a trainable token of a sub-agent: it takes the return of the main branch's last
    trainable token up to the step that called the sub-agent, if there is one.
    """
    itself, played, caller = np.arange(len(batch)), batch.played_id, parent_steps(batch)[batch.played_id]
    trained = np.flatnonzero(batch.mask & (caller == played))
    last = np.searchsorted(played[trained], caller, side="right") - 1
    parent = np.where(last >= 0, trained[last], itself) if len(trained) else itself
    called = batch.mask & (caller != played) & (batch.trajectory_id[parent] == batch.trajectory_id)
    return np.where(called, parent, itself)


def _reinforce_plus_plus(batch: FlatBatch, signals: Signals, options: DiscountConfig) -> Doubles:
    token = Rewards.of(batch, signals).token
    return reinforce_plus_plus(token, batch.mask, batch.trajectory_id, options.gamma, parent_tokens(batch))


def _reinforce_plus_plus_baseline(batch: FlatBatch, signals: Signals, options: Config) -> Doubles:
    rewards = Rewards.of(batch, signals).trajectory
    return reinforce_plus_plus_baseline(rewards, batch.group_of_trajectory, batch.mask, batch.trajectory_id)


def _gae(batch: FlatBatch, signals: Signals, options: GaeConfig) -> Doubles:
    if signals.values is None:
        raise ValueError("advantage gae needs the values of a value head (Signals.values)")
    source = parent_tokens(batch)
    main = batch.mask & (source == np.arange(len(batch)))
    token = np.asarray(np.bincount(source, Rewards.of(batch, signals).token, len(batch)), np.float64)
    advantage = gae(token, signals.values, main, batch.trajectory_id, options.gamma, options.gae_lambda)
    # A sub-agent's token takes the return of the step that called it.
    togo = (advantage + signals.values)[source]
    return np.where(batch.mask & ~main, togo - signals.values, advantage)


def _grpo(rewards: Doubles, group: Indices, options: NormConfig) -> Doubles:
    return grpo(rewards, group, options.norm_by_std)


GRPO = Advantage(_by_trajectory(_grpo), options_type=NormConfig)
RLOO = Advantage(_by_trajectory(lambda rewards, group, options: rloo(rewards, group)))
MAXRL = Advantage(_by_trajectory(lambda rewards, group, options: maxrl(rewards, group)))
STEP_RETURN = Advantage(_by_main_step(_step_return), options_type=StepReturnConfig, by_step=True)
GIGPO = Advantage(_by_main_step(_gigpo), options_type=GigpoConfig, by_step=True)
FORKS = Advantage(_forks, options_type=ForksConfig, by_fork=True)
REINFORCE_PLUS_PLUS = Advantage(
    _reinforce_plus_plus, options_type=DiscountConfig, by_group=False, by_step=True, by_token=True
)
REINFORCE_PLUS_PLUS_BASELINE = Advantage(_reinforce_plus_plus_baseline)
GAE = Advantage(_gae, options_type=GaeConfig, needs_values=True, by_group=False, by_step=True, by_token=True)


def has_zero_advantage(group: Group, config: AlgorithmConfig) -> bool:
    """Return whether the advantages of all trainable tokens of the group are 0.

    KL in the reward and the teacher are ignored, as they are not known yet. The test uses advantages, not rewards: a
    group with equal rewards but a penalty in one attempt does teach something.
    """
    batch = flatten(by_role([group]))
    return not advantages(batch, config)[batch.mask].any()
