"""`GatewayDriver`: the base of drivers whose attempts call the model over HTTP; `AgentDriver`, for agent programs.

AgentSession <- Gateway <- HTTP <- whatever `run` starts -> Graded
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
from treadle.rollout.gateway.answers import Answers
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import CallOptions, GivenUp, Reply, Session, SessionSpec

_DEFAULT = CallOptions()

_GRACE = 5.0  # seconds that an agent whose time is over has to clean up
BAD_REQUESTS = Metric("bad_requests", "trajectory", "sum", "requests", "malformed requests of agents, which get a 400")

CallError = StepsExceeded | ContextExceeded | EngineError
"""What a call of an agent is refused or fails with."""


class AgentSession(Session):
    """Records an attempt whose calls come from an agent program: at most `max_calls`, those that the engine failed not
    counted.

    last_error: error of the last call to end, if it had one; an answer does not clear a StepsExceeded. errors: all of
    these, as they come.
    """

    def __init__(self, spec: SessionSpec, parse: ReplyParser = plain, *, max_calls: int) -> None:
        super().__init__(spec, parse)
        self._max_calls, self._failed = max_calls, 0
        self.last_error: CallError | None = None
        self.errors: asyncio.Queue[CallError] = asyncio.Queue()
        self._answers, self._asked = Answers(), dict[int, int]()

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: CallOptions = _DEFAULT
    ) -> Reply:
        with self._watched():
            return self._answered(await super().chat(messages, tools, options))

    async def complete(self, prompt: str | Sequence[int], options: CallOptions = _DEFAULT) -> Reply:
        with self._watched():
            return self._answered(await super().complete(prompt, options))

    def reject_unused(self) -> None:
        """Reject the steps whose answers the agent threw away (`gateway.answers`)."""
        for number in self._answers.unused({number for number, step in self._steps.items() if step.dropped is None}):
            if number not in self.said_used:
                self.reject(number)

    def _numbered(self, prompt: Prompt, limit: int | None = None) -> int:
        self._check_calls()  # again: others may have been numbered while this one was rendered
        if prompt.messages:
            place = self._answers.ask(prompt.messages, prompt.rendering.values if prompt.rendering else ())
        else:
            place = self._answers.ask_raw(self.renderer.decode(prompt.ids))
        number = super()._numbered(prompt, limit)
        self._asked[number] = place
        return number

    def _answered(self, reply: Reply) -> Reply:
        self._answers.answer(self._asked.pop(reply.number), reply.number, reply.message)
        return reply

    def _check_calls(self) -> None:
        if self._calls - self._failed >= self._max_calls:
            raise StepsExceeded(self._max_calls)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            self._check_calls()
            yield
        except (StepsExceeded, ContextExceeded, EngineError) as error:
            self.last_error = error
            self._failed += isinstance(error, EngineError)
            self.errors.put_nowait(error)
            raise
        if not isinstance(self.last_error, StepsExceeded):
            self.last_error = None


@dataclass(frozen=True, slots=True)
class Graded:
    """What an attempt was given at its end: its reward, and metrics of level `trajectory`.

    warning: something that went wrong without touching the reward. ended_by: if the driver knows it; default: the limit
    that the session's last call met, if it did. recovered: whether its code got over each call that was not answered.
    stopped: whether a time limit of the attempt, whose reward counts, ended its code in the middle of what it did.
    """

    reward: Reward
    metrics: Measures = field(default_factory=Measures)
    warning: str = ""
    ended_by: AttemptError | None = None
    recovered: bool = False
    stopped: bool = False


class GatewayDriver(AttemptDriver[AgentSession]):
    """Plays attempts that reach the model through the run's gateway, each under a secret of its own.

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

        address: where the session is reached until this has returned; it takes no calls afterwards.
        """
        ...

    async def play(self, session: AgentSession, task: Task, user: UserCode) -> Outcome:
        """Run the attempt and return how that ended, and how many of its requests were malformed.

        If a call failed on this side (engine, gateway, chat template), or was given up by the client, and no retry of
        it was answered, there is no reward: what graded the attempt may have graded that. If its code raises after its
        last call was refused for a limit, or for want of an answer, that call's error decides how the attempt ended; if
        it was a limit, what the code raised becomes a warning.
        """
        try:
            graded = await self._attached(task, session, user)
            session.reward_last(graded.reward)
        except TrajectoryFailure as error:
            ended_by = _lost(session, error) or session.last_error
            if error.cause is not user.cause or ended_by is None:
                outcome = outcome_of(session.steps, error, user.cause)
            else:
                outcome = outcome_of(session.steps, ended_by, user.cause)
                outcome = outcome if outcome.failure else replace(outcome, warning=error.message)
        except DataError as error:
            failure = TrajectoryFailure(user.cause, f"the {user.cause}'s reward: {error}")
            outcome = outcome_of(session.steps, failure, user.cause)
        else:
            outcome = outcome_of(session.steps, _ended_by(graded, session, user.cause), user.cause)
            if not outcome.failure:
                outcome = replace(outcome, metrics=graded.metrics, warning=graded.warning)
        if not (refused := session.bad_requests):
            return outcome
        what = f"{len(refused)} of its requests were malformed, the first: {refused[0]}"
        metrics = outcome.metrics + measured("trajectory", {BAD_REQUESTS: [len(refused)]})
        return replace(outcome, metrics=metrics, warning="; ".join(filter(None, (outcome.warning, what))))

    async def _attached(self, task: Task, session: AgentSession, user: UserCode) -> Graded:
        try:
            async with self.gateway.attached(session) as address:
                return await self.run(task, session, address, user)
        finally:
            session.close()
            if self.config.infer_rejected:
                session.reject_unused()


def _ended_by(graded: Graded, session: AgentSession, cause: Cause) -> AttemptError | None:
    """Return what ended a graded attempt: a call that failed for good, or the limit that its last call met."""
    if isinstance(graded.ended_by, TrajectoryFailure):
        return graded.ended_by
    lost = [f.error for f in session.unanswered if not (graded.stopped and isinstance(f.error, GivenUp))]
    if lost and not graded.recovered:
        return _failure(lost[0], cause)
    over = isinstance(session.last_error, EngineError) and any(was_played(step) for step in session.steps)
    return graded.ended_by or (None if over else session.last_error)


def _lost(session: AgentSession, raised: TrajectoryFailure) -> AttemptError | None:
    """Return the failure of a call that was not answered. Of a refused one, what its code then raised says more."""
    errors = [failed.error for failed in session.unanswered]
    refusals = DataError if session.last_error is None else ()
    lost = next((error for error in errors if not isinstance(error, refusals)), None)
    if isinstance(lost, GivenUp):  # for which what was raised elsewhere may be the reason
        message = f"{raised.message.removesuffix('.')}; {_given_up(lost)}"
        return TrajectoryFailure(Cause.INFRASTRUCTURE, message, raised.traceback)
    return None if lost is None else _failure(lost, raised.cause)


def _failure(error: BaseException, cause: Cause) -> AttemptError:
    remedy = "an agent that does without the answer returns treadle.Recovered(reward)"
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
    """Return the failure, with a remedy if an SDK failed whose calls never came to the session."""
    module = type(failure.__cause__).__module__.partition(".")[0]
    if session.steps or session.last_error or module not in ("openai", "anthropic", "httpx"):
        return failure
    remedy = "no call came to the client that the agent is given; use it, or its base_url and api_key"
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
