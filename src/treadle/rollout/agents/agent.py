"""Agent programs: code that drives the conversation itself, through an SDK, played as one attempt."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from treadle.core import registry
from treadle.core.errors import ConfigError
from treadle.core.rewards import Reward
from treadle.core.types import Task
from treadle.core.user_functions import Expected, check_function
from treadle.rollout.agents.clients import wanted_client, wants_anthropic
from treadle.rollout.isolation.user_code import is_async

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


@dataclass(frozen=True)
class Recovered:
    """Returned by an agent that recovered from unanswered calls, so that its reward counts anyway.

    Otherwise an attempt has no reward if a call failed in the engine, the gateway or the chat template, or was given up
    by the client (a time limit, a cancelled race), and no retry was answered: its grade might reflect a slow engine.
    """

    reward: float | Reward


_PACKAGES = ("openai", "fastapi", "uvicorn")  # in the extra `train`


class AsyncAgent(Protocol):
    """Plays one attempt: `async def agent(task, client)`, or an object callable in the same way.

    client: a ready OpenAI client; every call through it is recorded and may be trained. The trained model answers,
    whatever model a call names. If annotated as `anthropic.AsyncAnthropic`, it is an Anthropic client. Other SDKs reach
    the same session by its `base_url` and `api_key`.

    Returns the attempt's reward, which is added to its last step, plain or as `Recovered`. If it raises, or takes more
    than `rollout.agent_timeout` seconds, this attempt fails. It shares the run's event loop: run blocking code with
    `asyncio.to_thread`, or write a `SyncAgent`.
    """

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float | Reward | Recovered: ...


class SyncAgent(Protocol):
    """Plays one attempt as `AsyncAgent` does, but as plain `def agent(task, client)`, in its own thread.

    client: OpenAI's synchronous client. At `rollout.agent_timeout` the attempt ends without waiting for the thread.
    """

    def __call__(self, task: Task, client: OpenAI) -> float | Reward | Recovered: ...


Agent = AsyncAgent | SyncAgent

AGENT_FUNCTION = Expected(
    "    async def agent(task, client):  # or plain def\n        ...  # call client, return the reward, a float"
)


def load_agent(name: str) -> Agent:
    """Return the agent `name` (registered under `treadle.agents`, or `module:attribute`).

    Raises ConfigError for an unknown name, a non-function, parameters other than (task, client), or missing packages.
    """
    return check_agent(registry.resolve("agents", name), name)


def check_agent(candidate: object, name: str) -> Agent:
    """Return the object if it is an agent. Raises ConfigError as `load_agent` does."""
    where = f"agents: {name!r}"
    check_function(candidate, where, AGENT_FUNCTION)
    wanted = wanted_client(candidate).removeprefix("Async")
    if wanted in ("OpenAI", "Anthropic") and (wanted != wanted_client(candidate)) is not is_async(candidate):
        kinds = [("a plain def", wanted), ("an async def", f"Async{wanted}")]
        (kind, given), (other, annotated) = reversed(kinds) if is_async(candidate) else kinds
        raise ConfigError(
            f"{where} is {kind}, which is given a client of class {given}, and its client is annotated as "
            f"{annotated}; annotate it as {given}, or write {other}"
        )
    others = ["anthropic"] if wants_anthropic(candidate) else []
    if missing := [package for package in (*_PACKAGES, *others) if importlib.util.find_spec(package) is None]:
        install = " ".join(["pip install 'treadle[train]'", *others])
        raise ConfigError(f"{where} needs {', '.join(missing)}; {install}")
    return cast(Agent, candidate)


def is_agent(candidate: object) -> bool:
    """Return whether it is an agent: any `async def`, or a function with a second parameter `client`."""
    if inspect.isclass(candidate) or not callable(candidate):
        return False
    return is_async(candidate) or list(inspect.signature(candidate).parameters)[1:2] == ["client"]
