"""`GatewayDriver`: base of drivers for attempts that call the model over HTTP; `AgentDriver`, for agent programs.

AgentSession <- Gateway <- HTTP <- any code started by `run` -> Graded
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

from treadle.core.errors import Cause, ContextExceeded, DataError, EngineError, StepsExceeded, TrajectoryFailure
from treadle.core.metrics import Measures, Metric, measured
from treadle.core.outcomes import was_played
from treadle.core.rewards import NUMBER, Reward, is_reward
from treadle.core.types import Message, Task
from treadle.rendering.identity import Prompt
from treadle.rendering.replies import ReplyParser, Tool, plain
from treadle.rollout.agents.agent import Agent, Recovered
from treadle.rollout.agents.clients import client_of
from treadle.rollout.drivers.driver import AttemptDriver, DriverSetup
from treadle.rollout.drivers.outcome import AttemptError, Outcome, outcome_of
from treadle.rollout.gateway.gateway import Access, SessionAddress
from treadle.rollout.gateway.retries import Exchanges, GivenUp
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import CallOptions, Reply, Session, SessionSpec

_DEFAULT = CallOptions()

_GRACE = 5.0  # seconds for an agent to clean up after its time limit
BAD_REQUESTS = Metric("bad_requests", "trajectory", "sum", "requests", "malformed requests of agents, which get a 400")

CallError = StepsExceeded | ContextExceeded | EngineError
"""Errors that an agent's call may fail with."""


class AgentSession(Session):
    """Records an attempt with calls from an agent program: at most `max_calls`, excluding engine failures.

    last_error: error of the last call to end, if any; an answer does not clear a StepsExceeded. errors: all of these,
    in order.
    """

    def __init__(self, spec: SessionSpec, parse: ReplyParser = plain, *, max_calls: int) -> None:
        super().__init__(spec, parse)
        self._max_calls, self._counted = max_calls, 0
        self.last_error: CallError | None = None
        self.errors: asyncio.Queue[CallError] = asyncio.Queue()

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: CallOptions = _DEFAULT
    ) -> Reply:
        with self._watched():
            return await super().chat(messages, tools, options)

    async def complete(self, prompt: str | Sequence[int], options: CallOptions = _DEFAULT) -> Reply:
        with self._watched():
            return await super().complete(prompt, options)

    def _numbered(self, prompt: Prompt, limit: int | None = None) -> int:
        # Again, as other calls may have been numbered while this one was rendered.
        self._check_calls()
        number = super()._numbered(prompt, limit)
        self._counted += 1
        return number

    def _check_calls(self) -> None:
        if self._counted >= self._max_calls:
            raise StepsExceeded(self._max_calls)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            self._check_calls()
            yield
        except (StepsExceeded, ContextExceeded, EngineError) as error:
            self.last_error = error
            self._counted -= isinstance(error, EngineError)
            self.errors.put_nowait(error)
            raise
        if not isinstance(self.last_error, StepsExceeded):
            self.last_error = None


@dataclass(frozen=True, slots=True)
class Graded:
    """Result of an attempt: its reward, and metrics of level `trajectory`.

    warning: a problem without influence on the reward. ended_by: error that ended it, if the driver knows it; default:
    the limit met by the session's last call, if any. recovered: whether its code recovered from each unanswered call.
    stopped: whether a time limit interrupted the code of an attempt that still counts.
    """

    reward: Reward
    metrics: Measures = field(default_factory=Measures)
    warning: str = ""
    ended_by: AttemptError | None = None
    recovered: bool = False
    stopped: bool = False


class GatewayDriver(AttemptDriver[AgentSession]):
    """Plays attempts that reach the model through the run's gateway, each under its own secret.

    Subclass it and write `run`.
    """

    def __init__(self, setup: DriverSetup) -> None:
        self.config, self._setup = setup.config, setup

    async def __aenter__(self) -> Self:
        """Serve the gateway. Raises ConfigError if its address is not available."""
        self.gateway = await self._setup.gateway.open()
        return self

    def open_session(self, spec: SessionSpec) -> AgentSession:
        return AgentSession(spec, self._setup.parse, max_calls=self.config.max_steps)

    @abstractmethod
    async def run(self, task: Task, session: AgentSession, address: SessionAddress, user: UserCode) -> Graded:
        """Play the attempt and return its reward. Raises TrajectoryFailure.

        address: address of the session until this returns; it takes no calls afterwards.
        """
        ...

    async def play(self, session: AgentSession, task: Task, user: UserCode) -> Outcome:
        """Run the attempt and return how it ended, and the number of its malformed requests.

        If a call failed on this side (engine, gateway, chat template), or was given up by the client, and no retry of
        it was answered, there is no reward: the grade might reflect that. If its code raises after its last call was
        refused for a limit, or got no answer, that call's error decides how the attempt ended; for a limit, the code's
        own error becomes a warning.
        """
        try:
            access = Access(user.models, infer_rejected=self.config.infer_rejected)
            async with self.gateway.attached(session, access) as clients:
                graded = await self.run(task, session, clients.address, user)
            session.reward_last(graded.reward)
        except TrajectoryFailure as error:
            ended_by = _lost(session, clients.exchanges, error) or session.last_error
            if error.cause is not user.cause or ended_by is None:
                outcome = outcome_of(session.steps, error, user.cause)
            else:
                outcome = outcome_of(session.steps, ended_by, user.cause)
                outcome = outcome if outcome.failure else replace(outcome, warning=error.message)
        except DataError as error:
            failure = TrajectoryFailure(user.cause, f"the {user.cause}'s reward: {error}")
            outcome = outcome_of(session.steps, failure, user.cause)
        else:
            ended_by = _ended_by(graded, session, clients.exchanges, user.cause)
            outcome = outcome_of(session.steps, ended_by, user.cause)
            if not outcome.failure:
                outcome = replace(outcome, metrics=graded.metrics, warning=graded.warning)
        if not (refused := clients.exchanges.bad_requests):
            return outcome
        what = f"{len(refused)} of its requests were malformed, the first: {refused[0]}"
        metrics = outcome.metrics + measured("trajectory", {BAD_REQUESTS: [len(refused)]})
        return replace(outcome, metrics=metrics, warning="; ".join(filter(None, (outcome.warning, what))))


def _ended_by(graded: Graded, session: AgentSession, calls: Exchanges, cause: Cause) -> AttemptError | None:
    """Return the error that ended a graded attempt: a permanently failed call, or the limit met by its last call."""
    if isinstance(graded.ended_by, TrajectoryFailure):
        return graded.ended_by
    lost = [f.error for f in calls.unanswered if not (graded.stopped and isinstance(f.error, GivenUp))]
    if lost and not graded.recovered:
        return _failure(lost[0], cause)
    over = isinstance(session.last_error, EngineError) and any(was_played(step) for step in session.steps)
    return graded.ended_by or (None if over else session.last_error)


def _lost(session: AgentSession, calls: Exchanges, raised: TrajectoryFailure) -> AttemptError | None:
    """Return the failure of an unanswered call. For a refused one, the error its code then raised is more specific."""
    errors = [failed.error for failed in calls.unanswered]
    refusals = DataError if session.last_error is None else ()
    lost = next((error for error in errors if not isinstance(error, refusals)), None)
    # Possibly caused by the error raised elsewhere.
    if isinstance(lost, GivenUp):
        message = f"{raised.message.removesuffix('.')}; {_given_up(lost)}"
        return TrajectoryFailure(Cause.INFRASTRUCTURE, message, raised.traceback)
    return None if lost is None else _failure(lost, raised.cause)


def _failure(error: BaseException, cause: Cause) -> AttemptError:
    remedy = "an agent that continues without the answer returns treadle.Recovered(reward)"
    match error:
        case EngineError():
            return error
        case DataError():
            return TrajectoryFailure(cause, f"a call was refused, and no retry of it answered: {error}; {remedy}")
        case GivenUp():
            return TrajectoryFailure(Cause.INFRASTRUCTURE, f"{_given_up(error)}; raise its time limit, or {remedy}")
        case _:
            return TrajectoryFailure(Cause.INFRASTRUCTURE, f"a call failed, and no retry of it was answered: {error}")


def _given_up(error: GivenUp) -> str:
    return f"a call was not answered: {error}, and no later one of the same content was answered"


class AgentDriver(GatewayDriver):
    """Plays the tasks of agent programs."""

    def __init__(self, agents: Mapping[str, Agent], setup: DriverSetup) -> None:
        super().__init__(setup)
        self._agents = agents

    def replays(self, task: Task) -> bool:
        return bool(getattr(self._agents[task.agent], "replayable", True))

    async def run(self, task: Task, session: AgentSession, address: SessionAddress, user: UserCode) -> Graded:
        agent, timeout = self._agents[task.agent], self.config.agent_timeout
        async with client_of(agent, address.base_url, address.secret, timeout) as client:
            try:
                return await user.call(
                    agent, task, client, what="the agent", timeout=timeout, check=_graded, grace=_GRACE
                )
            except TrajectoryFailure as failure:
                raise _astray(failure, session) from failure


def _astray(failure: TrajectoryFailure, session: AgentSession) -> TrajectoryFailure:
    """Return the failure, with a remedy if an SDK failed without ever calling the session."""
    module = type(failure.__cause__).__module__.partition(".")[0]
    if session.steps or session.last_error or module not in ("openai", "anthropic", "httpx"):
        return failure
    remedy = "the agent did not use the client passed to it; use it, or its base_url and api_key"
    return TrajectoryFailure(failure.cause, f"{failure.message.removesuffix('.')}; {remedy}", failure.traceback)


def _graded(value: object) -> Graded:
    if isinstance(value, Recovered):
        return replace(_graded(value.reward), recovered=True)
    if not isinstance(value, Reward) and not is_reward(value):
        raise TrajectoryFailure(
            Cause.AGENT,
            f"the agent returned {value!r:.100}; it must return its reward, a {NUMBER}, or a Reward, or raise",
        )
    return Graded(Reward.of(value))
