"""An environment of one reply, from a function that says what the reply is worth."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

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
        """Grade the reply."""
        grade = self._reward(self.task, text)
        return _awaited(grade) if inspect.isawaitable(grade) else EnvStep(reward=grade, done=True)


async def _awaited(grade: Awaitable[Grade]) -> EnvStep:
    return EnvStep(reward=await grade, done=True)


def is_reward_function(found: object) -> bool:
    """Return whether it is a function of (task, text).

    An agent is one of (task, client), and what makes environments, of nothing.
    """
    if inspect.isclass(found) or not callable(found):
        return False
    try:
        parameters = list(inspect.signature(found).parameters)
    except ValueError:  # a builtin that does not say
        return False
    return parameters[1:2] == ["text"]
