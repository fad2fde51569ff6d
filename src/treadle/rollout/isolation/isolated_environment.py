"""`IsolatedEnvironment`: the environment of one attempt, called as user code, its answers checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np

from treadle.core.errors import Cause, TrajectoryFailure
from treadle.core.metrics import Measures
from treadle.core.rewards import NUMBER, Reward, is_reward
from treadle.core.types import Message, Status, Task, as_messages
from treadle.envs.base import Environment, EnvStep, Finish, Reply
from treadle.envs.tasks import SingleTurn, made_class
from treadle.rollout.config import RolloutConfig
from treadle.rollout.env_metrics import EnvMetrics
from treadle.rollout.isolation.user_code import UserCode, is_async
from treadle.rollout.session import Reply as SessionReply

T = TypeVar("T")

EnvironmentFactory = Callable[[], Environment]


class IsolatedEnvironment:
    """The environment of one attempt. Whatever goes wrong in it is raised as TrajectoryFailure.

    `async` methods run on the event loop, others on the attempt's thread. An environment given by its class is made
    there, too, if its `step` is not `async`.

    longest_wait: the environment's own, once made. tools, takes_reply (whether `step` takes a parsed `Reply`),
    required_steps: known once it is reset.
    """

    def __init__(self, name: str, factory: EnvironmentFactory, user: UserCode, config: RolloutConfig) -> None:
        self._name, self._factory, self._user, self._config = name, factory, user, config
        self._environment: Environment | None = None
        self._metrics: EnvMetrics | None = None
        self.longest_wait, self.required_steps, self.takes_reply = 0.0, 0, False
        self.tools: tuple[Mapping[str, Any], ...] = ()

    async def make(self) -> None:
        """Make the environment. The failure's cause (`__cause__`) is what the constructor raised."""
        made = made_class(self._factory)
        step = getattr(made, "step", None)
        in_thread = inspect.isclass(made) and step is not None and not is_async(step)
        await self._user.call(self._make, what="create", timeout=self._config.environment_timeout, in_thread=in_thread)

    async def reset(self, task: Task) -> list[Message]:
        """Start the attempt and return its first messages. Fails if it needs more than `rollout.max_steps` calls."""
        messages = await self._call("reset", task, check=self._checked_reset)
        if self.required_steps > self._config.max_steps:
            raise _failure(
                f"environment {self._name!r} needs {self.required_steps} calls of the model, and rollout.max_steps is "
                f"{self._config.max_steps}; set rollout.max_steps={self.required_steps}, or let it take fewer turns"
            )
        return messages

    async def step(self, reply: SessionReply) -> EnvStep:
        """Return the environment's answer to a reply, and count its metrics."""
        what = "the reward function" if isinstance(self._environment, SingleTurn) else "step"
        argument: str | Reply = reply.text
        if self.takes_reply:
            thought, calls = reply.message.get("reasoning_content", ""), tuple(reply.message.get("tool_calls", ()))
            argument = Reply(reply.text, thought, calls)
        return await self._call("step", argument, check=partial(self._checked_step, what=what), what=what)

    async def finish(self, ended: Status) -> Reward:
        """Finish the attempt, count its metrics, and return what is added to the last reward."""
        finish = getattr(self._environment, "finish", None)
        if finish is None or getattr(finish, "__func__", None) is Environment.finish:
            return Reward()
        return await self._call("finish", ended, check=self._checked_finish)

    async def close(self) -> str:
        """Close the environment. Return what went wrong, as a warning; the attempt is over and keeps its reward.

        If the attempt's thread is stuck, a plain `close` runs there once it is free; nothing waits for it.
        """
        thread = self._user.thread
        if thread is not None and thread.is_abandoned and not self._is_async("close"):
            thread.submit(self._close)
        elif self._environment is not None:
            try:
                await self._call("close", check=lambda _: None)
            except TrajectoryFailure as error:
                return error.message
        return ""

    def metrics(self) -> Measures:
        return Measures() if self._metrics is None else self._metrics.measured()

    async def _call(self, method: str, *arguments: Any, check: Callable[[Any], T], what: str = "") -> T:
        return await self._user.call(
            lambda: getattr(self._environment, method)(*arguments),
            what=what or method,
            timeout=self._config.environment_timeout,
            check=check,
            in_thread=not self._is_async(method),
        )

    def _is_async(self, method: str) -> bool:
        return is_async(inspect.getattr_static(self._environment, method, None))

    def _make(self) -> None:
        self._environment = self._factory()
        self._metrics = EnvMetrics(self._name, self._environment)
        self.longest_wait = float(getattr(self._environment, "longest_wait", 0.0))

    def _close(self) -> None:
        if self._environment is not None and not self._is_async("close"):
            self._environment.close()

    def _checked_reset(self, value: object) -> list[Message]:
        messages = _checked_messages(value, "reset")
        environment: Any = self._environment
        self.tools = tuple(getattr(environment, "tool_schemas", ()))
        self.required_steps = int(getattr(environment, "required_steps", 0))
        annotations = [p.annotation for p in inspect.signature(environment.step).parameters.values()]
        self.takes_reply = any(kind is Reply or str(kind).rpartition(".")[2] == "Reply" for kind in annotations)
        return list(messages)

    def _checked_step(self, value: object, what: str) -> EnvStep:
        if not isinstance(value, tuple) or not 4 <= len(value) <= 5:
            raise _failure(f"step must return EnvStep(observations, reward, done, info, state), got {value!r:.100}")
        step = EnvStep(*value)
        reward = _checked_reward(step.reward, what)
        if not isinstance(step.done, bool | np.bool_):
            raise _failure(f"step gave done={step.done!r:.100}; it must be true or false")
        if not isinstance(step.state, str):
            raise _failure(f"step gave state={step.state!r:.100}; it must be a string")
        assert self._metrics is not None
        self._metrics.record(step.info, "step")
        observations = step.observations if step.done else _checked_messages(step.observations, "step")
        return step._replace(observations=observations, reward=reward, done=bool(step.done))

    def _checked_finish(self, value: object) -> Reward:
        if value is None:
            return Reward()
        if not isinstance(value, tuple) or not 1 <= len(value) <= 2:
            raise _failure(f"finish must return Finish(reward, info) or None, got {value!r:.100}")
        finish = Finish(*value)
        assert self._metrics is not None
        self._metrics.record(finish.info, "finish")
        return _checked_reward(finish.reward, "finish")


def _checked_messages(value: object, where: str) -> tuple[Message, ...]:
    try:
        messages = as_messages(value, where)  # type: ignore[arg-type]
        for message in messages:
            message["content"].encode()  # a lone surrogate cannot be tokenized
    except (ValueError, TypeError) as error:
        raise _failure(f"{where} must give messages: {error}") from error
    if not messages:
        raise _failure(f"{where} gave no messages for the agent to read, and is not done")
    return messages


def _checked_reward(value: object, where: str) -> Reward:
    if not isinstance(value, Reward) and not is_reward(value):
        raise _failure(f"{where} gave the reward {value!r:.100}; it must be a {NUMBER}, or a Reward")
    return Reward.of(value)


def _failure(message: str) -> TrajectoryFailure:
    return TrajectoryFailure(Cause.ENVIRONMENT, message)
