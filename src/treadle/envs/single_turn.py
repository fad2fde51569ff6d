"""An environment of one reply, from a function that says what the reply is worth."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial

from treadle.core import registry
from treadle.core.errors import ConfigError
from treadle.core.rewards import Reward
from treadle.core.types import Task
from treadle.envs.base import Environment, EnvStep

Grade = float | Reward
RewardFunction = Callable[[Task, str], Grade | Awaitable[Grade]]
"""`def reward(task, text)`, async or not: what a reply to the task's prompt is worth."""


class SingleTurn(Environment):
    """Plays one reply of the agent to the task's prompt; `reward`, called in the attempt's thread, grades it."""

    def __init__(self, reward: RewardFunction) -> None:
        self._reward = reward

    def step(self, text: str) -> EnvStep | Awaitable[EnvStep]:
        grade = self._reward(self.task, text)
        return _awaited(grade) if inspect.isawaitable(grade) else EnvStep(reward=grade, done=True)


async def _awaited(grade: Awaitable[Grade]) -> EnvStep:
    return EnvStep(reward=await grade, done=True)


def is_reward_function(candidate: object) -> bool:
    """Whether it is a function of (task, text); an agent is one of (task, client)."""
    if inspect.isclass(candidate) or not callable(candidate):
        return False
    try:
        parameters = list(inspect.signature(candidate).parameters)
    except ValueError:  # a builtin that does not say
        return False
    return parameters[1:2] == ["text"]


def load_reward(name: str) -> Callable[[], Environment]:
    """Return what makes environments of the reward function `name` (`module:function`, or a registered name).

    Raises ConfigError for an unknown name, and for what cannot be called with a task and a text.
    """
    candidate = registry.resolve("rewards", name, "reward")
    if inspect.isclass(candidate) or not callable(candidate):
        kind = "a class" if inspect.isclass(candidate) else f"of type {type(candidate).__name__}"
        raise ConfigError(f"reward: {name!r} is {kind}, it must be a function: def reward(task, text), async or not")
    try:
        inspect.signature(candidate).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"reward: {name!r} is called as reward(task, text), but: {error}") from error
    return partial(SingleTurn, candidate)
