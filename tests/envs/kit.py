"""Scripted attempts at an environment's tasks."""

import asyncio
from collections.abc import Sequence
from inspect import isawaitable
from typing import Any

from treadle.core.types import Task
from treadle.envs.base import EnvStep


def play(environment: Any, task: Task, *replies: str) -> list[EnvStep]:
    """What the environment, whose methods may be async, answers to each reply; all but the last may not end it."""

    async def settled(value: Any) -> Any:
        return await value if isawaitable(value) else value

    async def episode() -> list[EnvStep]:
        assert await settled(environment.reset(task)) == task.prompt
        return [await settled(environment.step(text)) for text in replies]

    steps = asyncio.run(episode())
    assert not any(step.done for step in steps[:-1])
    return steps


def contents(steps: Sequence[EnvStep]) -> list[str]:
    """What the agent reads."""
    return [message["content"] for step in steps for message in step.observations]
