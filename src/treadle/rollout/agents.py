"""Agent programs: code that drives the conversation itself, through an SDK, and is played as one attempt.

    AgentSession <- Gateway <- HTTP <- client <- agent(task, client) -> reward

An agent is written as for any model behind an API; here it stands at the gateway of the run, on the loopback interface,
and its calls are recorded like those of an environment's loop.
"""

from __future__ import annotations

import importlib.util
import inspect
import resource
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, cast

from treadle.core import registry
from treadle.core.errors import (
    Cause,
    ConfigError,
    ContextExceeded,
    DataError,
    EngineError,
    StepsExceeded,
    TrajectoryFailure,
)
from treadle.core.outcomes import was_played
from treadle.core.rewards import NUMBER, Reward, is_reward
from treadle.core.types import Message, Status, Task
from treadle.rollout.clients import async_client, sync_client
from treadle.rollout.conversation import Prompt
from treadle.rollout.foreign import Outcome, UserCode, is_async
from treadle.rollout.gateway.gateway import Gateway
from treadle.rollout.replies import ReplyParser, Tool
from treadle.rollout.session import CallOptions, Reply, Session

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

_DEFAULT = CallOptions()
_PACKAGES = ("openai", "fastapi", "uvicorn")  # the extra `agents`
_FILES = 65536
_GRACE = 5.0  # seconds that an agent whose time is over has to clean up


class AsyncAgent(Protocol):
    """Plays one attempt: `async def agent(task, client)`, or an object that is called like that.

    client: of OpenAI's SDK, and ready; all that is asked through it is recorded and may be trained. Whatever name of a
    model is given, the trained one answers. Other SDKs reach the same session by its `base_url` and `api_key`
    (`treadle.rollout.clients.anthropic_client`).

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


class AgentSession(Session):
    """A session whose calls come from an agent program: at most `max_calls`.

    last_error: what the last call to end was refused or failed with; None if it was answered.
    """

    def __init__(self, *arguments: Any, max_calls: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._max_calls = max_calls
        self.last_error: StepsExceeded | ContextExceeded | EngineError | None = None

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: CallOptions = _DEFAULT
    ) -> Reply:
        """As of any session, and raises StepsExceeded for one call too many."""
        with self._watched():
            return await super().chat(messages, tools, options)

    async def complete(self, prompt: str | Sequence[int], options: CallOptions = _DEFAULT) -> Reply:
        """As of any session, and raises StepsExceeded for one call too many."""
        with self._watched():
            return await super().complete(prompt, options)

    def _numbered(self, prompt: Prompt) -> int:
        self._check_calls()  # again: others may have been numbered while this one was rendered
        return super()._numbered(prompt)

    def _check_calls(self) -> None:
        if self._calls >= self._max_calls:
            raise StepsExceeded(self._max_calls)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            self._check_calls()
            yield
        except (StepsExceeded, ContextExceeded, EngineError) as error:
            self.last_error = error
            raise
        self.last_error = None


class AgentHost:
    """Plays attempts by agent programs. All of them reach the model through one gateway.

    parse: reads their replies. max_steps: most calls of an attempt. timeout: of an attempt, seconds.
    """

    def __init__(
        self, agents: Mapping[str, Agent], gateway: Gateway, parse: ReplyParser, max_steps: int, timeout: float
    ) -> None:
        self._agents, self._gateway, self._parse = agents, gateway, parse
        self._max_steps, self._timeout = max_steps, timeout

    def open_session(self, *arguments: Any) -> AgentSession:
        """A session for `play`; takes what `Session` takes, but for its parser."""
        return AgentSession(*arguments, self._parse, max_calls=self._max_steps)

    async def play(self, session: AgentSession, task: Task, user: UserCode) -> Outcome:
        """Run the task's agent on this session, and close it."""
        warning = ""
        try:
            try:
                reward = await self._run(task, session, user)
            except TrajectoryFailure as error:
                reward, warning = _reward_after(error, session), error.message
            if not any(was_played(step) for step in session.steps):
                raise _nothing_recorded(session)
            _reward_last(session, reward)
        except TrajectoryFailure as error:
            return Outcome.failed(error)
        return Outcome(_status(session), reward.total(), warning=warning)

    async def _run(self, task: Task, session: AgentSession, user: UserCode) -> Reward:
        agent = self._agents[task.agent]
        open_client = async_client if is_async(agent) else sync_client
        try:
            async with (
                self._gateway.attached(session) as address,
                open_client(address.base_url, address.secret, self._timeout) as client,
            ):
                return await user.call(
                    agent, task, client, what="the agent", timeout=self._timeout, check=_checked_reward, grace=_GRACE
                )
        finally:
            session.close()


@asynccontextmanager
async def hosting(
    agents: Mapping[str, Agent], parse: ReplyParser, max_steps: int, timeout: float
) -> AsyncIterator[AgentHost | None]:
    """A host with its gateway on a free port of the loopback interface; None, and no server, if there are no agents."""
    if not agents:
        yield None
        return
    from treadle.rollout.gateway.serving import serving  # FastAPI and uvicorn

    _allow_files()
    gateway = Gateway()
    async with serving(gateway):
        yield AgentHost(agents, gateway, parse, max_steps, timeout)


def _allow_files() -> None:
    """Let this process open more files: an attempt holds a few sockets and files, and hundreds are played at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


def _checked_reward(value: object) -> Reward:
    if not isinstance(value, Reward) and not is_reward(value):
        raise TrajectoryFailure(
            Cause.AGENT,
            f"the agent returned {value!r:.100}; it must return its reward, a {NUMBER}, or a Reward, or raise",
        )
    return Reward.of(value)


def _reward_last(session: AgentSession, reward: Reward) -> None:
    try:
        session.reward_last(reward)
    except DataError as error:
        raise TrajectoryFailure(Cause.AGENT, f"the agent's reward: {error}") from error


def _reward_after(error: TrajectoryFailure, session: AgentSession) -> Reward:
    """The reward of an agent that raised: 0.0 if the last thing it met was a limit, as when an environment's loop ends
    there. Otherwise it raises: the engine's failure if that was it, or `error`.
    """
    if error.cause is not Cause.AGENT or session.last_error is None:
        raise error
    if isinstance(session.last_error, EngineError):
        raise TrajectoryFailure(Cause.ENGINE, str(session.last_error)) from error
    return Reward()


def _nothing_recorded(session: AgentSession) -> TrajectoryFailure:
    if isinstance(session.last_error, ContextExceeded):
        return TrajectoryFailure(Cause.CONTEXT, str(session.last_error))
    if isinstance(session.last_error, EngineError):
        return TrajectoryFailure(Cause.ENGINE, str(session.last_error))
    return TrajectoryFailure(
        Cause.AGENT, "the agent ended without a single answer of the model; it must ask through the client it is given"
    )


def _status(session: AgentSession) -> Status:
    match session.last_error:
        case StepsExceeded():
            return Status.MAX_STEPS
        case ContextExceeded():
            return Status.CONTEXT
        case _:
            return Status.DONE
