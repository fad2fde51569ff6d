"""From an attempt's given rewards to its training rewards.

    (group ->) Step.given -weights-> Step.reward, Trajectory.reward        facts: recorded, shown, evaluated
               -hook, length penalty, overlong-> Step.shaping, Trajectory.dropped      in training only

Training uses reward + shaping. Each adds its component to `Step.given`, so that the record shows its effect.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from treadle.core import registry
from treadle.core.config import Config
from treadle.core.errors import Cause, DataError, TrajectoryFailure
from treadle.core.outcomes import as_played, as_trained, was_played
from treadle.core.rewards import NUMBER, TOKENS, Reward, reward_sum
from treadle.core.types import DropReason, Failure, Ids, Status, Step, StopReason, Task, Trajectory
from treadle.core.user_functions import Expected, check_function
from treadle.rollout.isolation.user_code import UserCode

SHAPING, LENGTH_PENALTY, OVERLONG = "shaping", "length_penalty", "overlong"
"""Components added by shaping: the hook's plain numbers, the penalty, deductions of `zero_reward`."""

Hook = Callable[[Task, Trajectory], Any]
"""A shaping hook: returns additions to each step, a sequence of float or `Reward`; may be async."""

GroupReward = Callable[[Task, Sequence[Trajectory]], Any]
"""Returns additions to each attempt of a group, a list of float or `Reward`; may be async; may take `decode`, ids to
text."""

SHAPING_FUNCTION = Expected(
    "    def shaping(task, trajectory):\n        return [-0.01 for step in trajectory.steps]",
    f"a list with one {NUMBER}, or Reward, for each step",
)
GROUP_FUNCTION = Expected(
    "    def group_reward(task, trajectories):\n        return [-0.1 * len(each.steps) for each in trajectories]",
    f"a list with one {NUMBER}, or Reward, for each attempt",
)


class LengthPenaltyConfig(Config):
    """The soft overlong punishment; see `length_penalty`."""

    free: int = Field(ge=0, description="sampled tokens of a trajectory without a penalty")
    limit: int = Field(ge=1, description="sampled tokens of a trajectory with the full penalty")
    max: float = Field(1.0, gt=0, allow_inf_nan=False, description="the full penalty")

    @model_validator(mode="after")
    def _rises(self) -> LengthPenaltyConfig:
        if self.limit <= self.free:
            raise ValueError(f"limit is {self.limit} and free {self.free}; limit must be the greater")
        return self


class RewardsConfig(Config):
    """How rewards become training rewards. Evaluations use only weights and group rewards."""

    weights: dict[str, float] = Field(
        default_factory=dict, description="weight of each named component of a reward; 1 for those not named"
    )
    group: str | None = Field(
        None, description="rewards all attempts of a group together: a registered name or module:function"
    )
    shaping: str | None = Field(
        None, description="adds to the rewards of steps, in training: a registered name or module:function"
    )
    length_penalty: LengthPenaltyConfig | None = Field(
        None, description="subtracted from the reward of long trajectories, in training"
    )
    overlong: Literal["keep", "drop", "zero_reward"] = Field(
        "keep", description="handling of trajectories cut off by the context or the completion limit, in training"
    )

    @field_validator("weights")
    @classmethod
    def _finite(cls, value: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name, weight in value.items() if not math.isfinite(weight)]:
            raise ValueError(f"the weight of {wrong[0]!r} is {value[wrong[0]]}; it must be finite")
        if TOKENS in value:
            raise ValueError(f"{TOKENS!r} are the rewards of single tokens, which have no weight; leave it out")
        return value

    @property
    def shapes(self) -> bool:
        """Whether training may use other rewards than the recorded ones."""
        return self.shaping is not None or self.length_penalty is not None or self.overlong != "keep"


class RewardShaper:
    """Applies a `RewardsConfig` to finished attempts. Raises ConfigError for an unknown function.

    Copies of the policy are weighted and shaped like their attempts.

    timeout: limit of a call of the user's functions, in seconds. decode: for a group reward.
    """

    def __init__(self, config: RewardsConfig, timeout: float, decode: Callable[[Ids], str] | None = None) -> None:
        self._config, self._timeout = config, timeout
        self._hook = None if config.shaping is None else load_shaping(config.shaping)
        self.group = None if config.group is None else load_group_reward(config.group, decode)

    def apply_weights(self, trajectory: Trajectory) -> Trajectory:
        """Apply the weights. A sum too large for a reward fails the attempt (environment)."""
        trajectory = replace(trajectory, copies=tuple(map(self.apply_weights, trajectory.copies)))
        try:
            return apply_weights(trajectory, self._config.weights)
        except DataError as error:
            return _failed(trajectory, Cause.ENVIRONMENT, str(error))

    async def shape(self, task: Task, trajectory: Trajectory, user: UserCode) -> Trajectory:
        """Return the trajectory as used in training.

        The attempt fails if the hook raises or returns anything but rewards (verifier), or hangs (timeout).
        """
        if trajectory.reward is None or not self._config.shapes:
            return trajectory
        copies = [await self.shape(task, copy, user) for copy in trajectory.copies]
        trajectory = replace(trajectory, copies=tuple(copies))
        try:
            if self._hook is not None:
                trajectory = await self._by_hook(self._hook, task, trajectory, user)
            if self._config.length_penalty is not None:
                taken = length_penalty(as_played(trajectory).completion_tokens, self._config.length_penalty)
                trajectory = apply_length_penalty(trajectory, taken)
        except TrajectoryFailure as error:
            return _failed(trajectory, error.cause, error.message, error.traceback)
        except DataError as error:
            return _failed(trajectory, Cause.VERIFIER, f"rewards.shaping: {error}")
        return apply_overlong_policy(trajectory, self._config.overlong)

    async def reward_group(self, task: Task, name: str, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return the attempts of a group with the function's rewards, weighted.

        Each is added to the reward of the attempt's last reply. All fail if the function raises or returns anything but
        a reward for each (verifier), or hangs (timeout). Metrics measured meanwhile are counted with the first.
        """
        if self.group is None or not trajectories:
            return list(trajectories)

        def add(values: Any) -> list[Trajectory]:
            with _refusing("rewards.group", GROUP_FUNCTION, self.group, values):
                rewards = [Reward.of(value) for value in values]
                if len(rewards) != len(trajectories):
                    raise DataError(f"there are {len(rewards)} rewards for {len(trajectories)} attempts")
                pairs = zip(trajectories, rewards, strict=True)
                return [reward_last(trajectory, reward, self._config.weights) for trajectory, reward in pairs]

        user = UserCode("rewards.group", Cause.VERIFIER, f"task {task.task_id}, group {name}")
        arguments = task.copy(), tuple(trajectories)
        try:
            made = await user.call(self.group, *arguments, what="rewards.group", timeout=self._timeout, check=add)
        except TrajectoryFailure as error:
            made = [_failed(t, error.cause, error.message, error.traceback) for t in trajectories]
        finally:
            user.release()
        return [with_measured(made[0], user), *made[1:]]

    async def _by_hook(self, hook: Hook, task: Task, trajectory: Trajectory, user: UserCode) -> Trajectory:
        """Call the hook on the event loop even if it is not `async`: one call at a time, as it may keep state."""

        def add(values: Any) -> Trajectory:
            with _refusing("rewards.shaping", SHAPING_FUNCTION, hook, values):
                rewards = [Reward.of(value, SHAPING) for value in values]
                return add_rewards(trajectory, rewards, self._config.weights)

        return await user.call(
            hook,
            task,
            trajectory,
            what="rewards.shaping",
            timeout=self._timeout,
            check=add,
            cause=Cause.VERIFIER,
            in_thread=False,
        )


def with_measured(trajectory: Trajectory, user: UserCode) -> Trajectory:
    """Return the trajectory with metrics measured while its code was running."""
    return replace(trajectory, metrics=trajectory.metrics + user.measured) if user.measured else trajectory


def load_shaping(name: str) -> Hook:
    """Return the hook `name` (registered under `treadle.shaping`, or `module:function`). Raises ConfigError."""
    return _load("shaping", name, "rewards.shaping", SHAPING_FUNCTION)


def load_group_reward(name: str, decode: Callable[[Ids], str] | None = None) -> GroupReward:
    """Return the function `name` (registered under `treadle.group_rewards`, or `module:function`)."""
    return _load("group_rewards", name, "rewards.group", GROUP_FUNCTION, decode=decode)


def _load(kind: str, name: str, setting: str, expected: Expected, **optional: Any) -> Callable[..., Any]:
    """optional: further parameters that the function may have."""
    function: Callable[..., Any] = registry.resolve(kind, name, setting)
    check_function(function, f"{setting}: {name!r}", expected, tuple(optional))
    taken = {key: value for key, value in optional.items() if key in inspect.signature(function).parameters}
    return partial(function, **taken) if taken else function


@contextmanager
def _refusing(setting: str, expected: Expected, function: object, values: object) -> Iterator[None]:
    """Turn invalid values returned by the function into a failure of the attempt."""
    try:
        if not isinstance(values, Iterable):
            raise DataError("no rewards")
        yield
    except DataError as error:
        message = f"{setting}: {expected.refusal(function, values, str(error), line=True)}"
        raise TrajectoryFailure(Cause.VERIFIER, message) from error


def reward_last(trajectory: Trajectory, added: Reward, weights: Mapping[str, float]) -> Trajectory:
    """Add to the reward of the last played step other than a summary, if any, and weight it.

    Raises DataError as `add_rewards` does.
    """
    steps = list(trajectory.steps)
    last = max((n for n, step in enumerate(steps) if was_played(step) and not step.summary), default=None)
    if not added or last is None:
        return trajectory
    given = steps[last].given.plus(added)
    steps[last] = replace(steps[last], given=given, reward=given.total(weights))
    return _checked(replace(trajectory, steps=tuple(steps), reward=reward_sum(step.reward for step in steps)))


def apply_weights(trajectory: Trajectory, weights: Mapping[str, float]) -> Trajectory:
    """Set each step's reward to the weighted sum of its components, and the trajectory's to the sum of its steps'.

    Raises DataError for a sum too large for a reward.
    """
    if trajectory.reward is None or not weights:
        return _checked(trajectory)
    steps = tuple(replace(step, reward=step.given.total(weights)) if step.given else step for step in trajectory.steps)
    return _checked(replace(trajectory, steps=steps, reward=reward_sum(step.reward for step in steps)))


def _checked(trajectory: Trajectory) -> Trajectory:
    """Raise DataError if one of its sums is too large for a reward."""
    sums = [as_trained(trajectory).reward or 0.0, *(step.reward + step.shaping for step in trajectory.steps)]
    for total in (*sums, *as_played(trajectory).components.values()):
        reward_sum([total])
    return trajectory


def length_penalty(tokens: int, config: LengthPenaltyConfig) -> float:
    """Compute max * clip((tokens - free) / (limit - free), 0, 1) for all sampled tokens of a trajectory.

    Source: Yu et al. 2025, "DAPO", eq. 13, the soft overlong punishment, with limit = L_max, limit - free = L_cache.
    """
    return config.max * min(max((tokens - config.free) / (config.limit - config.free), 0.0), 1.0)


def add_rewards(trajectory: Trajectory, added: Sequence[Reward], weights: Mapping[str, float]) -> Trajectory:
    """Add a reward to each step; it must be empty for steps that were not played.

    added: one reward per step. Raises DataError for another number of them or of tokens, for a reward of a step that
    was not played, or for sums that are too large.
    """
    if len(added) != len(trajectory.steps):
        raise DataError(f"there are {len(added)} rewards for {len(trajectory.steps)} steps")
    steps = list(trajectory.steps)
    for number, (step, more) in enumerate(zip(trajectory.steps, added, strict=True)):
        if more and not was_played(step):
            raise DataError("a reward for a step with an undelivered answer; give 0 for it")
        if more:
            steps[number] = replace(step, given=step.given.plus(more), shaping=step.shaping + more.total(weights))
    return _checked(replace(trajectory, steps=tuple(steps)))


def apply_length_penalty(trajectory: Trajectory, taken: float) -> Trajectory:
    """Subtract the length penalty from the last played step."""
    last = max((number for number, step in enumerate(trajectory.steps) if was_played(step)), default=None)
    if not taken or last is None:
        return trajectory
    penalty = {last: Reward({LENGTH_PENALTY: -taken})}
    return add_rewards(trajectory, [penalty.get(number, Reward()) for number in range(len(trajectory.steps))], {})


def is_overlong(trajectory: Trajectory) -> bool:
    """Return whether the context was full, or the last completion reached `max_tokens`."""
    steps = as_played(trajectory).steps
    return trajectory.status is Status.CONTEXT or (bool(steps) and steps[-1].stop_reason is StopReason.LENGTH)


def apply_overlong_policy(trajectory: Trajectory, overlong: str) -> Trajectory:
    """Keep, drop or zero the trajectory if it is overlong. Zeroing cancels all its rewards."""
    if overlong == "keep" or not is_overlong(trajectory):
        return trajectory
    if overlong == "drop":
        return replace(trajectory, dropped=DropReason.OVERLONG)
    return replace(trajectory, steps=tuple(map(_zeroed, trajectory.steps)))


def _zeroed(step: Step) -> Step:
    trained = step.reward + step.shaping
    tokens = None if step.given.tokens is None else -step.given.tokens
    rest = math.fsum([-trained, step.given.token_sum])
    given = step.given.plus(Reward({OVERLONG: rest} if rest else {}, tokens))
    return replace(step, shaping=0.0 - step.reward, given=given)


def _failed(trajectory: Trajectory, cause: Cause, message: str, traceback: str = "") -> Trajectory:
    """Fail the attempt, in all its roles."""
    failure, copies = Failure(cause, message, traceback), [_failed(c, cause, message) for c in trajectory.copies]
    return replace(trajectory, reward=None, status=Status.FAILED, failure=failure, copies=tuple(copies))
