"""`IsolatedEnvironment`: an environment behind the boundary of user code, from being made to being closed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.core.metrics import Measures
from treadle.core.rewards import NUMBER, Reward, is_reward
from treadle.core.types import Message, Status, Task, as_messages
from treadle.envs.base import Environment, EnvStep, Finish, Reply
from treadle.envs.single_turn import SingleTurn
from treadle.envs.tasks import made_class
from treadle.rollout.env_metrics import EnvMetrics
from treadle.rollout.isolation.user_code import UserCode, is_async

T = TypeVar("T")

EnvironmentFactory = Callable[[], Environment]


class IsolatedEnvironment:
    """Runs one attempt's environment. What it returns is checked, and of plain types.

    timeout: limit on each call but `finish`, seconds. `async` methods run on the event loop, others on the attempt's
    own thread. The environment is made on that thread, too, if it is given by its class and has a plain `step`. What
    goes wrong is raised as TrajectoryFailure.

    refusal: of its constructor, which was given options that cannot work; None if there was none.
    """

    def __init__(self, name: str, factory: EnvironmentFactory, user: UserCode, timeout: float) -> None:
        self._name, self._factory, self._user, self._timeout = name, factory, user, timeout
        self._environment: Environment | None = None
        self._metrics: EnvMetrics | None = None
        self.refusal: ConfigError | None = None

    async def make(self) -> None:
        """Make the environment. On the event loop nothing is awaited, so that a cancelled call leaves none behind."""
        if _is_synchronous(self._factory):
            await self._user.call(self._made, what="create", timeout=self._timeout, check=_as_it_is, in_thread=True)
        else:
            self._user.run(self._made, "create")

    async def reset(self, task: Task) -> tuple[Message, ...]:
        """Start the attempt and return the messages that the agent starts from."""
        return await self._call("reset", task, check=partial(checked_messages, where="reset"))

    def check_steps(self, max_steps: int) -> None:
        """Raise TrajectoryFailure (environment) if the attempt, once reset, requires more calls than `max_steps`."""
        required = self._user.run(lambda: int(getattr(self._environment, "required_steps", 0)), "required_steps")
        if required > max_steps:
            raise TrajectoryFailure(
                Cause.ENVIRONMENT,
                f"environment {self._name!r} needs {required} calls of the model to come to its end, and "
                f"rollout.max_steps is {max_steps}; set rollout.max_steps={required}, or let it take fewer turns",
            )

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Return the tools that the model is told of, as JSON schemas, once the environment is reset."""
        return self._user.run(lambda: tuple(getattr(self._environment, "tool_schemas", ())), "tool_schemas")

    @property
    def reads_replies(self) -> bool:
        """Return whether `step` takes a parsed `Reply`."""
        return self._user.run(lambda: _takes_reply(getattr(self._environment, "step", None)), "step")

    async def step(self, reply: str | Reply) -> EnvStep:
        """Return the environment's answer to a reply, and count its metrics."""
        what = "the reward function" if isinstance(self._environment, SingleTurn) else "step"
        return await self._call("step", reply, check=partial(self._checked_step, what=what), what=what)

    async def finish(self, ended: Status, timeout: float) -> Reward:
        """Let the environment finish the attempt, count its metrics, and return what it adds to the last reward.

        timeout: limit on the call, seconds.
        """
        method = self._user.run(partial(getattr, self._environment, "finish", None), "finish")
        if method is None or getattr(method, "__func__", None) is Environment.finish:  # no subclass, or none of its own
            return Reward()
        return await self._user.call(method, ended, what="finish", timeout=timeout, check=self._checked_finish)

    async def close(self) -> str:
        """Close the environment; return a warning if that fails: the attempt is over and keeps its reward.

        Where its thread is stuck, it is closed once the thread is free.
        """
        if self._user.is_stuck:
            self._user.post(self._close_on_thread)
            return ""
        try:
            if self._environment is not None:
                await self._call("close", check=_as_it_is)
        except TrajectoryFailure as error:
            return error.message
        return ""

    def metrics(self) -> Measures:
        """Return the metrics measured so far."""
        return Measures() if self._metrics is None else self._metrics.measured()

    def longest_wait(self) -> float:
        """Return the seconds that a call may wait by its own limits, if the environment says so, or else 0."""
        return self._user.run(lambda: float(getattr(self._environment, "longest_wait", 0.0)), "longest_wait")

    def _made(self) -> None:
        try:
            self._environment = self._factory()
        except ConfigError as error:
            self.refusal = error
            raise
        self._metrics = EnvMetrics(self._name, self._environment)

    async def _call(self, method: str, *arguments: Any, check: Callable[[Any], T], what: str = "") -> T:
        what = what or method
        function = self._user.run(partial(getattr, self._environment, method), what)
        return await self._user.call(function, *arguments, what=what, timeout=self._timeout, check=check)

    def _close_on_thread(self) -> None:
        if self._environment is not None:
            closing = self._environment.close()
            if inspect.iscoroutine(closing):
                asyncio.run(closing)

    def _checked_step(self, value: object, what: str) -> EnvStep:
        step = _checked_step(value, what)
        assert self._metrics is not None
        self._metrics.record(step.info, "step")
        return step if step.done else step._replace(observations=checked_messages(step.observations, "step"))

    def _checked_finish(self, value: object) -> Reward:
        if value is None:
            return Reward()
        if not isinstance(value, tuple) or not 1 <= len(value) <= 2:
            raise TrajectoryFailure(
                Cause.ENVIRONMENT, f"finish must return Finish(reward, info) or None, got {value!r:.100}"
            )
        finish = Finish(*value)
        assert self._metrics is not None
        self._metrics.record(finish.info, "finish")
        return _checked_reward(finish.reward, "finish")


def checked_messages(value: object, where: str) -> tuple[Message, ...]:
    """Return the messages that an environment gives the agent to read. Raises TrajectoryFailure (environment)."""
    try:
        messages = as_messages(value, where)  # type: ignore[arg-type]
        for message in messages:
            message["content"].encode()  # a lone surrogate cannot be tokenized
    except (ValueError, TypeError) as error:
        raise TrajectoryFailure(Cause.ENVIRONMENT, f"{where} must give messages: {error}") from error
    if not messages:
        raise TrajectoryFailure(Cause.ENVIRONMENT, f"{where} gave no messages for the agent to read, and is not done")
    return messages


def _checked_step(value: object, what: str) -> EnvStep:
    if not isinstance(value, tuple) or not 4 <= len(value) <= 5:
        raise TrajectoryFailure(
            Cause.ENVIRONMENT,
            f"step must return EnvStep(observations, reward, done, info, state), got {value!r:.100}",
        )
    step = EnvStep(*value)
    reward = _checked_reward(step.reward, what)
    if not isinstance(step.done, bool | np.bool_):
        raise TrajectoryFailure(Cause.ENVIRONMENT, f"step gave done={step.done!r:.100}; it must be true or false")
    if not isinstance(step.state, str):
        raise TrajectoryFailure(Cause.ENVIRONMENT, f"step gave state={step.state!r:.100}; it must be a string")
    return step._replace(done=bool(step.done), reward=reward)


def _checked_reward(value: object, where: str) -> Reward:
    if not isinstance(value, Reward) and not is_reward(value):
        raise TrajectoryFailure(
            Cause.ENVIRONMENT, f"{where} gave the reward {value!r:.100}; it must be a {NUMBER}, or a Reward"
        )
    return Reward.of(value)


def _takes_reply(step: Any) -> bool:
    """Whether the parameter of `step` is annotated as a `Reply`."""
    annotations = [parameter.annotation for parameter in inspect.signature(step).parameters.values()]
    return any(kind is Reply or str(kind).rpartition(".")[2] == "Reply" for kind in annotations)


def _is_synchronous(factory: EnvironmentFactory) -> bool:
    """Return whether it makes environments with a plain `step`, as far as is known before it has made one."""
    made = made_class(factory)
    step = getattr(made, "step", None)
    return inspect.isclass(made) and step is not None and not is_async(step)


def _as_it_is(value: T) -> T:
    return value
