"""Agent programs: code that drives the conversation itself, through an SDK, and is played as one attempt.

What they are and how they are found; `drivers.agent` plays them.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from treadle.core import registry
from treadle.core.errors import ConfigError
from treadle.core.rewards import Reward
from treadle.core.types import Task
from treadle.rollout.isolation.user_code import is_async

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


@dataclass(frozen=True)
class Recovered:
    """Is returned by an agent that got over calls that failed: the reward counts all the same.

    Without it, an attempt has no reward if a call failed in the engine, the gateway or the chat template and was not
    repeated with success: whatever graded it may have graded that failure.
    """

    reward: float | Reward


_PACKAGES = ("openai", "fastapi", "uvicorn")  # the extra `agents`


class AsyncAgent(Protocol):
    """Plays one attempt: `async def agent(task, client)`, or an object that is called like that.

    client: of OpenAI's SDK, ready to use; every call through it is recorded and may be trained. Whatever model name a
    call gives, the trained model answers. Other SDKs reach the same session by its `base_url` and `api_key`
    (`treadle.rollout.agents.clients.anthropic_client`).

    Returns the attempt's reward, which belongs to its last step, or that as `Recovered`. What it raises, and
    an attempt of more than `rollout.agent_timeout` seconds, fails this attempt alone. It shares the run's event loop:
    what blocks belongs in `asyncio.to_thread`, or in a `SyncAgent`.
    """

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float | Reward | Recovered:
        """Play the attempt and return its reward."""
        ...


class SyncAgent(Protocol):
    """Plays one attempt as `AsyncAgent` does, but as plain `def agent(task, client)`, in a thread of its own.

    client: OpenAI's synchronous one. At `rollout.agent_timeout` the attempt ends, and nobody waits for the thread.
    """

    def __call__(self, task: Task, client: OpenAI) -> float | Reward | Recovered:
        """Play the attempt and return its reward."""
        ...


Agent = AsyncAgent | SyncAgent


def load_agent(name: str) -> Agent:
    """Return the agent `name` (registered under `treadle.agents`, or `module:attribute`), checked before anything runs.

    Raises ConfigError for an unknown name, for what is no function, for other parameters than (task, client), or if a
    package that agents need is missing.
    """
    return check_agent(registry.resolve("agents", name), name)


def check_agent(found: object, name: str) -> Agent:
    """Return the object, if it is an agent. Raises ConfigError as `load_agent` does."""
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
    """Return whether it is called as agent(task, client).

    That is any `async def`, or a function whose second parameter is `client`. Other functions make environments, or
    grade replies.
    """
    if inspect.isclass(found) or not callable(found):
        return False
    return is_async(found) or list(inspect.signature(found).parameters)[1:2] == ["client"]


def _last(name: str) -> str:
    return name.replace(":", ".").rpartition(".")[2]
