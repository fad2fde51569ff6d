"""The agent loop: one attempt at a task, and the attempts of a group side by side.

reset -> (chat -> step)* -> close          every call of foreign code is attributed once, here
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from typing import TypeVar

from pydantic import Field

from treadle.core.config import Config
from treadle.core.engine import Engine
from treadle.core.errors import Cause, ContextExceeded, DataError, EngineError, TrajectoryFailure
from treadle.core.types import (
    Failure,
    Group,
    Message,
    SamplingParams,
    Status,
    Task,
    Trajectory,
    as_messages,
    trajectory_id,
)
from treadle.envs.base import Environment, EnvStep
from treadle.rollout.chat import ChatRenderer
from treadle.rollout.session import Address, Session

T = TypeVar("T")
EnvironmentFactory = Callable[[], Environment]


class RolloutConfig(Config):
    """How an agent plays one attempt."""

    max_steps: int = Field(8, ge=1, description="most LLM calls of one trajectory")
    max_input_tokens: int = Field(1024, ge=1, description="longest prompt that may be sent, in tokens")
    max_completion_tokens: int = Field(256, ge=1, description="most tokens sampled per call")
    temperature: float = Field(1.0, gt=0, description="sampling temperature in training")
    stop: tuple[str, ...] = Field((), description="strings that end a completion")
    environment_timeout: float = Field(60.0, gt=0, description="limit on each call of an environment, seconds")


class Rollouts:
    """Plays attempts: everything they share, in one place."""

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        environments: dict[str, EnvironmentFactory],
        config: RolloutConfig,
    ) -> None:
        self.engine, self.renderer, self.environments, self.config = engine, renderer, environments, config

    def start(
        self, group_id: str, task: Task, addresses: list[Address], temperature: float | None = None
    ) -> list[Awaitable[Trajectory]]:
        """Open one session per address, now and in order; returns the attempts, to be awaited.

        Opening is immediate so that a lock-step engine knows of every attempt before the first one calls it.
        """
        sampling = SamplingParams(
            temperature=self.config.temperature if temperature is None else temperature,
            max_tokens=self.config.max_completion_tokens,
            stop=self.config.stop,
        )
        sessions = [
            Session(
                trajectory_id(group_id, a.attempt),
                self.engine,
                self.renderer,
                sampling,
                self.config.max_input_tokens,
                a,
            )
            for a in addresses
        ]
        return [self._attempt(task, session, a.attempt) for session, a in zip(sessions, addresses, strict=True)]

    async def _attempt(self, task: Task, session: Session, attempt: int) -> Trajectory:
        started = time.perf_counter()
        status, failure, warning = Status.FAILED, None, ""
        try:
            environment = await guarded(self._make(task), Cause.ENVIRONMENT, self.config.environment_timeout, "create")
            try:
                status = await self._play(environment, task, session)
            finally:
                session.close()
                warning = await self._close(environment)
        except TrajectoryFailure as error:
            failure = Failure(error.cause, error.message)
        finally:
            session.close()
        return Trajectory(
            trajectory_id=session.name,
            task_id=task.task_id,
            attempt=attempt,
            steps=tuple(session.steps),
            reward=None if failure else math.fsum(step.reward for step in session.steps),
            status=status if failure is None else Status.FAILED,
            failure=failure,
            warning=warning,
            seconds=time.perf_counter() - started,
        )

    async def _make(self, task: Task) -> Environment:
        return self.environments[task.environment]()

    async def _play(self, environment: Environment, task: Task, session: Session) -> Status:
        limit = self.config.environment_timeout
        opening = await guarded(environment.reset(task), Cause.ENVIRONMENT, limit, "reset")
        conversation: list[Message] = list(_checked_messages(opening, "reset"))
        for _ in range(self.config.max_steps):
            try:
                reply = await session.chat(conversation)
            except ContextExceeded as error:
                if not session.steps:
                    raise TrajectoryFailure(Cause.CONTEXT, str(error)) from error
                return Status.CONTEXT
            except EngineError as error:
                raise TrajectoryFailure(Cause.ENGINE, str(error)) from error
            answer = _checked_step(await guarded(environment.step(reply), Cause.ENVIRONMENT, limit, "step"))
            session.reward_last(answer.reward)
            if answer.done:
                return Status.DONE
            conversation += [
                Message(role="assistant", content=reply),
                *_checked_messages(answer.observations, "step"),
            ]
        return Status.MAX_STEPS

    async def _close(self, environment: Environment) -> str:
        """A failing `close` is reported but takes no reward away: the attempt was over."""
        try:
            await guarded(environment.close(), Cause.ENVIRONMENT, self.config.environment_timeout, "close")
        except TrajectoryFailure as error:
            return error.message
        return ""


async def guarded(call: Awaitable[T], cause: Cause, timeout: float, what: str) -> T:
    """Await foreign code for at most `timeout` seconds.

    Whatever it raises becomes a TrajectoryFailure of this cause, once, here; what it raised is chained.
    """
    work = asyncio.ensure_future(call)
    try:
        done, _pending = await asyncio.wait({work}, timeout=timeout)
    finally:
        work.cancel()  # of no effect if it is done
    if not done:
        raise TrajectoryFailure(Cause.TIMEOUT, f"{what} took longer than {timeout:g} s")
    error = work.exception() if not work.cancelled() else asyncio.CancelledError("cancelled itself")
    if error is not None:
        raise TrajectoryFailure(cause, f"{what} raised {type(error).__name__}: {error}") from error
    return work.result()


def _checked_messages(value: object, where: str) -> tuple[Message, ...]:
    try:
        messages = as_messages(value, where)  # type: ignore[arg-type]
    except (DataError, TypeError) as error:
        raise TrajectoryFailure(Cause.ENVIRONMENT, f"{where} must give messages: {error}") from error
    if not messages:
        raise TrajectoryFailure(Cause.ENVIRONMENT, f"{where} gave no messages for the agent to read, and is not done")
    return messages


def _checked_step(value: object) -> EnvStep:
    if not isinstance(value, tuple) or len(value) != 4:
        raise TrajectoryFailure(
            Cause.ENVIRONMENT,
            f"step must return EnvStep(observations, reward, done, info), got {value!r:.100}",
        )
    step = EnvStep(*value)
    if not isinstance(step.reward, Real) or not math.isfinite(step.reward):
        raise TrajectoryFailure(Cause.ENVIRONMENT, f"step gave the reward {step.reward!r}; it must be a finite number")
    return step._replace(reward=float(step.reward))


async def gather_group(
    name: str, index: int, epoch: int, position: int, task: Task, attempts: Sequence[Awaitable[Trajectory]]
) -> Group:
    """Wait for all attempts of one group."""
    return Group(name, index, epoch, position, task, tuple(await asyncio.gather(*attempts)))
