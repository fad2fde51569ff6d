"""Agent programs: code that drives the conversation itself, through an SDK, and is played as one attempt.

What they are and how they are found; `drivers.agent` plays them.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import TYPE_CHECKING, Protocol, cast

from treadle.core import registry
from treadle.core.errors import ConfigError
from treadle.core.rewards import Reward
from treadle.core.types import Task
from treadle.rollout.isolation.user_code import is_async

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

_PACKAGES = ("openai", "fastapi", "uvicorn")  # the extra `agents`


class AsyncAgent(Protocol):
    """Plays one attempt: `async def agent(task, client)`, or an object that is called like that.

    client: of OpenAI's SDK, and ready; all that is asked through it is recorded and may be trained. Whatever name of a
    model is given, the trained one answers. Other SDKs reach the same session by its `base_url` and `api_key`
    (`treadle.rollout.agents.clients.anthropic_client`).

    Returns the attempt's reward, which belongs to its last step. What it raises, and an attempt of more than
    `rollout.agent_timeout` seconds, fails this attempt alone. It shares the run's event loop: what blocks belongs into
    `asyncio.to_thread`, or into a `SyncAgent`.
    """

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float | Reward:
        """Play the attempt; returns its reward."""
        ...


class SyncAgent(Protocol):
    """Plays one attempt as `AsyncAgent` does, but as plain `def agent(task, client)`, in a thread of its own.

    client: OpenAI's synchronous one. At `rollout.agent_timeout` the attempt ends, and nobody waits for the thread.
    """

    def __call__(self, task: Task, client: OpenAI) -> float | Reward:
        """Play the attempt; returns its reward."""
        ...


Agent = AsyncAgent | SyncAgent


def load_agent(name: str) -> Agent:
    """The agent `name` (registered under `treadle.agents`, or `module:attribute`), checked before anything runs.

    Raises ConfigError: an unknown name, no function, other parameters than (task, client), or a package missing that
    agents need.
    """
    return check_agent(registry.resolve("agents", name), name)


def check_agent(found: object, name: str) -> Agent:
    """The object, if it is an agent. Raises ConfigError as `load_agent` does."""
    where = f"agents: {name!r}"
    if inspect.isclass(found) or not callable(found):
        raise ConfigError(
            f"{where} is of type {type(found).__name__}; write 'def {_last(name)}(task, client)', async or not"
        )
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{where} is called as agent(task, client), but: {error}") from error
    if missing := [package for package in _PACKAGES if importlib.util.find_spec(package) is None]:
        raise ConfigError(f"{where} needs {', '.join(missing)}; pip install 'treadle[agents]'")
    return cast(Agent, found)


def is_agent(found: object) -> bool:
    """Whether it is called as agent(task, client): any `async def`, or a function whose second parameter is `client`.

    Other functions make environments, or grade replies.
    """
    if inspect.isclass(found) or not callable(found):
        return False
    return is_async(found) or list(inspect.signature(found).parameters)[1:2] == ["client"]


def _last(name: str) -> str:
    return name.replace(":", ".").rpartition(".")[2]
