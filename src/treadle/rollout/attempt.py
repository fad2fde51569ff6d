"""The agent loop: one attempt at a task, and the attempts of a group side by side.

reset -> (chat -> step)* -> close          every call of user code goes through `foreign.UserCode`
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal, Protocol

from pydantic import Field

from treadle.core.config import Config
from treadle.core.draws import Stream
from treadle.core.engine import Engine
from treadle.core.errors import Cause, ContextExceeded, DataError, EngineError, TrajectoryFailure
from treadle.core.rewards import Reward, reward_sum
from treadle.core.types import (
    Group,
    Message,
    SamplingParams,
    Status,
    Task,
    Trajectory,
    trajectory_id,
)
from treadle.rollout.agents import Agent, AgentHost, hosting
from treadle.rollout.chat import ChatRenderer
from treadle.rollout.foreign import Outcome, UserCode
from treadle.rollout.isolated_environment import EnvironmentFactory, IsolatedEnvironment
from treadle.rollout.loop_monitor import LoopMonitor
from treadle.rollout.replies import AUTO, reply_parser
from treadle.rollout.rewards import Rewarding, RewardsConfig
from treadle.rollout.session import Address, CallOptions, Session

_AS_GIVEN = RewardsConfig()

_NEW, _CONTINUED = CallOptions(), CallOptions(continue_final_message=True)


class RolloutConfig(Config):
    """How an agent plays one attempt."""

    max_steps: int = Field(8, ge=1, description="most LLM calls of one trajectory")
    max_input_tokens: int = Field(1024, ge=1, description="longest prompt that may be sent, in tokens")
    max_completion_tokens: int = Field(256, ge=1, description="most tokens sampled per call")
    temperature: float = Field(1.0, gt=0, description="sampling temperature in training")
    top_k: int = Field(0, ge=0, description="in training: only the k most probable tokens (0: all)")
    top_p: float = Field(1.0, gt=0, le=1, description="in training: the fewest tokens that make up this probability")
    min_p: float = Field(0.0, ge=0, le=1, description="in training: tokens at least this likely, against the likeliest")
    stop: tuple[str, ...] = Field((), description="strings that end a completion")
    conversation: Literal["turns", "single_message"] = Field(
        "turns",
        description="where observations go: into messages of their own, or into the assistant's one message, as text",
    )
    environment_timeout: float = Field(60.0, gt=0, description="limit on each call of an environment, seconds")
    trajectory_timeout: float = Field(
        3600.0, gt=0, description="limit on a whole attempt, waiting for the engine included, seconds"
    )
    agent_timeout: float = Field(600.0, gt=0, description="limit on a whole attempt of an agent program, seconds")
    reply_parser: str = Field(
        AUTO, description="how agent programs' tool calls are read: a registered name, module:function, or auto"
    )

    @property
    def filters(self) -> bool:
        """Whether tokens are left out of what is sampled from, in training."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0


class Player(Protocol):
    """What plays tasks: `Rollouts`, or one that only takes its time. sampling: as for training."""

    sampling: SamplingParams

    def start(
        self, group_id: str, task: Task, addresses: list[Address], sampling: SamplingParams | None = None
    ) -> list[asyncio.Future[Trajectory]]:
        """Start one attempt at the task per address."""
        ...


class Rollouts:
    """Plays attempts: everything they share, in one place. agents: needed by tasks that name an agent.

    rewards: applied to each attempt as it ends; shaping only to those for training, as their addresses tell.
    monitor: watches the event loop that they are played on.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        environments: Mapping[str, EnvironmentFactory],
        config: RolloutConfig,
        agents: AgentHost | None = None,
        rewards: RewardsConfig = _AS_GIVEN,
        monitor: LoopMonitor | None = None,
    ) -> None:
        self.engine, self.renderer, self.environments, self.config = engine, renderer, environments, config
        self.agents, self._monitor = agents, monitor or LoopMonitor()
        self.sampling = SamplingParams(
            temperature=config.temperature,
            max_tokens=config.max_completion_tokens,
            stop=config.stop,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
        )
        self._rewarding = Rewarding(rewards, config.environment_timeout)

    def start(
        self, group_id: str, task: Task, addresses: list[Address], sampling: SamplingParams | None = None
    ) -> list[asyncio.Future[Trajectory]]:
        """Open one session per address, now and in order, and start the attempts. sampling: default: as for training.

        Opening is immediate so that a lock-step engine knows of every attempt before the first one calls it.
        """
        attempts: list[asyncio.Future[Trajectory]] = []
        for session, play, a in [(*self._open(group_id, task, a, sampling or self.sampling), a) for a in addresses]:
            attempt = asyncio.ensure_future(self._attempt(task, session, play, a))
            attempt.add_done_callback(partial(_close_session, session))  # also if it was cancelled before it began
            attempts.append(attempt)
        return attempts

    def _open(
        self, group_id: str, task: Task, address: Address, sampling: SamplingParams
    ) -> tuple[Session, Callable[[Task, UserCode], Awaitable[Outcome]]]:
        """A new session, and how the task is played on it."""
        name = trajectory_id(group_id, address.attempt)
        arguments = (name, self.engine, self.renderer, sampling, self.config.max_input_tokens, address)
        if self.agents is not None and task.agent:
            driven = self.agents.open_session(*arguments)
            return driven, partial(self.agents.play, driven)
        session = Session(*arguments)
        return session, partial(self._play_environment, session)

    async def _attempt(
        self, task: Task, session: Session, play: Callable[[Task, UserCode], Awaitable[Outcome]], address: Address
    ) -> Trajectory:
        started = time.perf_counter()
        user = user_code(task, session.name, self._monitor)
        try:
            outcome = await self._in_time(partial(play, task.copy(), user), user)
            played = Trajectory(
                trajectory_id=session.name,
                task_id=task.task_id,
                attempt=address.attempt,
                steps=tuple(session.steps),
                reward=outcome.reward,
                status=outcome.status,
                failure=outcome.failure,
                warning=outcome.warning,
                seconds=time.perf_counter() - started,
                metrics=outcome.metrics,
                blocked_seconds=user.blocked_seconds,
            )
            weighed = self._rewarding.weighed(played)
            if address.stream is not Stream.TRAIN:
                return weighed
            return await self._rewarding.shaped(task.copy(), weighed, user)
        finally:
            user.release()

    async def _in_time(self, play: Callable[[], Awaitable[Outcome]], user: UserCode) -> Outcome:
        limit, clock = self.config.trajectory_timeout, user.clock()
        try:
            async with asyncio.timeout(limit):
                outcome = await play()
            if not clock.was_overrun(limit):
                return outcome
        except TimeoutError:
            pass
        what = f"the attempt took longer than {limit:g} s (rollout.trajectory_timeout)"
        return Outcome.failed(TrajectoryFailure(Cause.TIMEOUT, what))

    async def _play_environment(self, session: Session, task: Task, user: UserCode) -> Outcome:
        factory, warning = self.environments[task.environment], ""
        environment = IsolatedEnvironment(task.environment, factory, user, self.config.environment_timeout)
        try:
            try:
                await environment.make()
                status = await self._play(environment, task, session)
            finally:
                session.close()  # first: the engine waits for it, and the environment may take its time
                warning = await environment.close()
            reward = _total(step.reward for step in session.steps)
            return Outcome(status, reward, warning=warning, metrics=environment.metrics())
        except TrajectoryFailure as error:
            return Outcome.failed(error, warning)

    async def _play(self, environment: IsolatedEnvironment, task: Task, session: Session) -> Status:
        conversation: list[Message] = list(await environment.reset(task))
        state = ""
        for _ in range(self.config.max_steps):
            try:
                going_on = self.config.conversation == "single_message" and conversation[-1]["role"] == "assistant"
                reply = await session.chat(conversation, options=_CONTINUED if going_on else _NEW)
            except ContextExceeded as error:
                if not session.steps:
                    raise TrajectoryFailure(Cause.CONTEXT, str(error)) from error
                return Status.CONTEXT
            except EngineError as error:
                raise TrajectoryFailure(Cause.ENGINE, str(error)) from error
            except DataError as error:
                raise TrajectoryFailure(Cause.ENVIRONMENT, str(error)) from error
            if state:
                session.set_state(reply.number, state)
            answer = await environment.step(reply.message["content"])
            state = answer.state
            try:
                session.reward_last(Reward.of(answer.reward))
            except DataError as error:
                raise TrajectoryFailure(Cause.ENVIRONMENT, f"step: {error}") from error
            if answer.done:
                return Status.DONE
            conversation += [reply.message, *answer.observations]
            if self.config.conversation == "single_message":
                conversation = _one_turn(conversation)
        return Status.MAX_STEPS


def _one_turn(conversation: Sequence[Message]) -> list[Message]:
    """All from the first assistant message on as one assistant message."""
    begin = next(n for n, message in enumerate(conversation) if message["role"] == "assistant")
    text = "".join(message["content"] for message in conversation[begin:])
    return [*conversation[:begin], Message(role="assistant", content=text)]


@asynccontextmanager
async def open_rollouts(
    engine: Engine,
    renderer: ChatRenderer,
    environments: Mapping[str, EnvironmentFactory],
    agents: Mapping[str, Agent],
    config: RolloutConfig,
    rewards: RewardsConfig = _AS_GIVEN,
    say: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Rollouts]:
    """`Rollouts`, with a gateway if there are agents. Raises ConfigError for a shaping hook that is not there.

    say: told of user code that blocks the event loop, from another thread.
    """
    parse = reply_parser(config.reply_parser, renderer.source)
    monitor = LoopMonitor(say)
    async with hosting(agents, parse, config.max_steps, config.agent_timeout) as host:
        with monitor.watching():
            yield Rollouts(engine, renderer, environments, config, host, rewards, monitor)


def user_code(task: Task, attempt: str, monitor: LoopMonitor | None = None) -> UserCode:
    """The environment or agent that plays an attempt at the task. attempt: the trajectory's id."""
    name = f"agent {task.agent!r}" if task.agent else f"environment {task.environment!r}"
    cause = Cause.AGENT if task.agent else Cause.ENVIRONMENT
    return UserCode(name, cause, f"task {task.task_id}, trajectory {attempt}", monitor)


def _total(rewards: Iterable[float]) -> float:
    try:
        return reward_sum(rewards)
    except DataError as error:
        raise TrajectoryFailure(Cause.ENVIRONMENT, f"the steps' {error}") from error


def _close_session(session: Session, _: object) -> None:
    session.close()


async def gather_group(
    name: str, index: int, epoch: int, position: int, task: Task, attempts: Sequence[Awaitable[Trajectory]]
) -> Group:
    """Wait for all attempts of one group."""
    return Group(name, index, epoch, position, task, tuple(await asyncio.gather(*attempts)))
