"""`AgentDriver`: agent programs, each of which drives the conversation itself, through an SDK.

    AgentSession <- Gateway <- HTTP <- client <- agent(task, client) -> reward

An agent is written as for any model behind an API; here it stands at the gateway of the run, and its calls are recorded
like those of an environment's loop.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

from treadle.core.errors import Cause, ContextExceeded, DataError, EngineError, StepsExceeded, TrajectoryFailure
from treadle.core.outcomes import was_played
from treadle.core.rewards import NUMBER, Reward, is_reward
from treadle.core.types import Message, Task
from treadle.rendering.conversation import Prompt
from treadle.rendering.replies import ReplyParser, Tool, plain
from treadle.rollout.agents.agent import Agent
from treadle.rollout.agents.clients import async_client, sync_client
from treadle.rollout.drivers.driver import AttemptDriver, DriverSetup
from treadle.rollout.drivers.outcome import Outcome, outcome_of
from treadle.rollout.gateway.gateway import Gateway
from treadle.rollout.isolation.user_code import UserCode, is_async
from treadle.rollout.session import CallOptions, Reply, Session, SessionSpec

_DEFAULT = CallOptions()
_FILES = 65536
_GRACE = 5.0  # seconds that an agent whose time is over has to clean up


class AgentSession(Session):
    """Records an attempt whose calls come from an agent program: at most `max_calls`.

    last_error: what the last call to end was refused or failed with; None if it was answered.
    """

    def __init__(self, spec: SessionSpec, parse: ReplyParser = plain, *, max_calls: int) -> None:
        super().__init__(spec, parse)
        self._max_calls = max_calls
        self.last_error: StepsExceeded | ContextExceeded | EngineError | None = None

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: CallOptions = _DEFAULT
    ) -> Reply:
        """Sample a reply as `Session.chat` does. Raises StepsExceeded, too, for one call too many."""
        with self._watched():
            return await super().chat(messages, tools, options)

    async def complete(self, prompt: str | Sequence[int], options: CallOptions = _DEFAULT) -> Reply:
        """Sample a completion as `Session.complete` does. Raises StepsExceeded, too, for one call too many."""
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


class AgentDriver(AttemptDriver[AgentSession]):
    """Plays the tasks of agent programs. They reach the model through one gateway, open as long as the driver is."""

    def __init__(self, agents: Mapping[str, Agent], setup: DriverSetup) -> None:
        self._agents, self._config, self._parse = agents, setup.config, setup.parse
        self._gateway, self._serving = Gateway(), AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Serve the gateway. Raises ConfigError for an address that cannot be had."""
        from treadle.rollout.gateway.serving import serving  # FastAPI and uvicorn

        _allow_files()
        await self._serving.enter_async_context(serving(self._gateway, self._config.gateway))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the gateway and every session's way in."""
        await self._serving.aclose()

    def open_session(self, spec: SessionSpec) -> AgentSession:
        """Open a session that takes `max_steps` calls."""
        return AgentSession(spec, self._parse, max_calls=self._config.max_steps)

    async def play(self, session: AgentSession, task: Task, user: UserCode) -> Outcome:
        """Run the task's agent and return how that ended.

        If the agent raises after its last call was refused for a limit or failed in the engine, that call's error
        decides how the attempt ended; where it was a limit, what the agent raised becomes a warning.
        """
        try:
            session.reward_last(await self._run(task, session, user))
        except TrajectoryFailure as error:
            if error.cause is not Cause.AGENT or session.last_error is None:
                return outcome_of(session.steps, error, user.cause)
            outcome = outcome_of(session.steps, session.last_error, user.cause)
            return outcome if outcome.failure else replace(outcome, warning=error.message)
        except DataError as error:
            failure = TrajectoryFailure(Cause.AGENT, f"the agent's reward: {error}")
            return outcome_of(session.steps, failure, user.cause)
        return outcome_of(session.steps, _limit(session), user.cause)

    async def _run(self, task: Task, session: AgentSession, user: UserCode) -> Reward:
        agent, timeout = self._agents[task.agent], self._config.agent_timeout
        open_client = async_client if is_async(agent) else sync_client
        try:
            async with (
                self._gateway.attached(session) as address,
                open_client(address.base_url, address.secret, timeout) as client,
            ):
                return await user.call(
                    agent, task, client, what="the agent", timeout=timeout, check=_checked_reward, grace=_GRACE
                )
        finally:
            session.close()


def _limit(session: AgentSession) -> StepsExceeded | ContextExceeded | EngineError | None:
    """Return what ended an attempt whose agent returned: the limit it met last. An engine's failure it has got over,
    unless no call was ever answered.
    """
    over = isinstance(session.last_error, EngineError) and any(was_played(step) for step in session.steps)
    return None if over else session.last_error


def _checked_reward(value: object) -> Reward:
    if not isinstance(value, Reward) and not is_reward(value):
        raise TrajectoryFailure(
            Cause.AGENT,
            f"the agent returned {value!r:.100}; it must return its reward, a {NUMBER}, or a Reward, or raise",
        )
    return Reward.of(value)


def _allow_files() -> None:
    """Let this process open more files: an attempt holds a few sockets and files, and hundreds are played at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
