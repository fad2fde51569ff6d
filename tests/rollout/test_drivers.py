"""Drivers from outside: they need no change of Treadle, and end an attempt by the same table as its own."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import AsyncOpenAI

from tests.worlds import HELLO, plain_renderer, saying, user
from treadle.core.draws import Stream
from treadle.core.errors import (
    Cause,
    ConfigError,
    ContextExceeded,
    DataError,
    EngineError,
    StepsExceeded,
    TrajectoryFailure,
)
from treadle.core.metrics import Metric, measured
from treadle.core.rewards import Reward
from treadle.core.types import Failure, Status, Task, Trajectory
from treadle.rollout.agents.clients import async_client
from treadle.rollout.attempt import Players, open_rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.driver import AttemptDriver, DriverFactory, DriverSetup, check_driver
from treadle.rollout.drivers.gateway import AgentSession, GatewayDriver, Graded
from treadle.rollout.drivers.outcome import ATTEMPT_ERRORS, Outcome, outcome_of
from treadle.rollout.gateway.address import GatewayConfig
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import Address, Session, SessionSpec
from treadle.testing import VirtualLoop

TASK = Task("t", HELLO, driver="mine")


async def played(driver: DriverFactory, attempts: int = 1, **settings: Any) -> list[Trajectory]:
    """Attempts at one task by this driver; every session must be closed afterwards."""
    engine = saying("a")
    config, players = RolloutConfig(max_completion_tokens=16, **settings), Players(drivers={"mine": driver})
    async with open_rollouts(engine, plain_renderer(), players, config) as rollouts:
        addresses = [Address(1, Stream.TRAIN, 0, 0, attempt) for attempt in range(attempts)]
        running = rollouts.start("g", TASK, addresses)
        assert engine.open == [f"g.{attempt}" for attempt in range(attempts)]  # before any of them plays
        trajectories = list(await asyncio.gather(*running))
    assert not engine.open
    return trajectories


class Asking(AttemptDriver[Session]):
    """Asks once, and then does what a subclass says; writes nothing but that."""

    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        await session.chat(task.prompt)
        await self.end(session, user)
        session.reward_last(Reward.of(0.5))
        return outcome_of(session.steps, None, user.cause)

    async def end(self, session: Session, user: UserCode) -> None: ...


def ending(act: Callable[[Session, UserCode], Any]) -> DriverFactory:
    class Ending(Asking):
        async def end(self, session: Session, user: UserCode) -> None:
            await act(session, user)

    return Ending


def raising(error: Exception) -> DriverFactory:
    async def act(session: Session, user: UserCode) -> None:
        raise error

    return ending(act)


def test_a_driver_writes_play_and_nothing_else() -> None:
    trajectories = asyncio.run(played(Asking, attempts=3))
    assert [t.trajectory_id for t in trajectories] == ["g.0", "g.1", "g.2"]
    for trajectory in trajectories:
        assert (trajectory.status, trajectory.reward, len(trajectory.steps)) == (Status.DONE, 0.5, 1)


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (ContextExceeded(9, 8), Status.CONTEXT, None),
        (StepsExceeded(3), Status.MAX_STEPS, None),
        (EngineError("out of memory"), Status.FAILED, Cause.ENGINE),
        (DataError("a reward of no tokens"), Status.FAILED, Cause.AGENT),
        (TrajectoryFailure(Cause.INFRASTRUCTURE, "the sandbox died"), Status.FAILED, Cause.INFRASTRUCTURE),
        (TrajectoryFailure(Cause.VERIFIER, "no tests"), Status.FAILED, Cause.VERIFIER),
    ],
    ids=lambda value: getattr(type(value), "__name__", ""),
)
def test_what_a_driver_raises_ends_its_attempt_by_the_table(
    error: Exception, status: Status, cause: Cause | None
) -> None:
    assert isinstance(error, ATTEMPT_ERRORS)
    [trajectory] = asyncio.run(played(raising(error)))
    message = error.message if isinstance(error, TrajectoryFailure) else str(error)
    expected = (status, 0.0, None) if cause is None else (Status.FAILED, None, Failure(cause, message))
    assert (trajectory.status, trajectory.reward, trajectory.failure) == expected
    assert len(trajectory.steps) == 1


def test_a_bug_of_a_driver_is_no_failed_attempt() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(played(raising(ZeroDivisionError())))


def test_limits_on_time_count_from_when_an_attempt_has_its_place() -> None:
    """Of ten that play one after another, 6 s each, the last one begins long after a limit of 10 s."""
    places = asyncio.Semaphore(1)

    class OneAtATime(Asking):
        may_wait = True

        @asynccontextmanager
        async def place(self) -> AsyncIterator[None]:
            async with places:
                yield

        async def end(self, session: Session, user: UserCode) -> None:
            await asyncio.sleep(6.0)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        trajectories = runner.run(played(OneAtATime, attempts=10, trajectory_timeout=10.0))
        assert runner.get_loop().time() == pytest.approx(60.0, abs=0.1)
    assert [t.status for t in trajectories] == [Status.DONE] * 10


def test_what_all_attempts_share_is_opened_before_them_and_closed_after_them() -> None:
    happened: list[str] = []

    class Sharing(Asking):
        def __init__(self, setup: DriverSetup) -> None:
            happened.append(f"made for {setup.config.max_completion_tokens} tokens")

        async def __aenter__(self) -> "Sharing":
            happened.append("opened")
            return self

        async def __aexit__(self, *error: object) -> None:
            happened.append("closed")

        def open_session(self, spec: SessionSpec) -> Session:
            happened.append(f"session {spec.name}")
            return super().open_session(spec)

    asyncio.run(played(Sharing, attempts=2))
    assert happened == ["made for 16 tokens", "opened", "session g.0", "session g.1", "closed"]


async def test_each_driver_checks_its_first_task_and_no_more_are_read() -> None:
    checked: list[str] = []

    class Checking(Asking):
        async def check(self, session: Session, task: Task) -> None:
            checked.append(task.task_id)

    def tasks() -> Iterator[Task]:
        yield from (replace(TASK, task_id=name) for name in "ab")
        raise AssertionError("a large data set is read to its end")

    players = Players(drivers={"mine": Checking})
    async with open_rollouts(saying("a"), plain_renderer(), players, RolloutConfig()) as rollouts:
        await rollouts.check(tasks())  # type: ignore[arg-type]
    assert checked == ["a"]


class Silent(AttemptDriver[Session]):
    pass


class TwoArguments(Asking):
    def __init__(self, setup: DriverSetup, more: int) -> None: ...


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (3, "'it' is of type int, it must be a subclass of AttemptDriver"),
        (user, "'it' is of type function, it must be"),
        (Silent, "'it': play is missing; write 'async def play"),
        (Session, "'it' is no subclass of AttemptDriver"),
        (
            TwoArguments,
            "'it' is made with a DriverSetup and, if any, its options_type, but: missing a required argument: 'more'",
        ),
    ],
)
def test_what_is_no_driver_is_refused(found: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_driver(found, "it")


class Calling(GatewayDriver):
    """Asks over HTTP, as often as the task says, and then does what its prompt says."""

    def __init__(self, setup: DriverSetup, urls: list[str]) -> None:
        super().__init__(setup)
        self.urls = urls

    async def run(self, task: Task, session: AgentSession, address: SessionAddress, user: UserCode) -> Graded:
        self.urls.append(address.base_url)
        async with async_client(address.base_url, address.secret, 20.0) as client:
            return await user.call(self.act, task, client, what="run", timeout=20.0, check=lambda value: value)

    async def act(self, task: Task, client: AsyncOpenAI) -> Graded:
        for _ in range(task.extras["calls"]):
            await client.with_options(max_retries=0).chat.completions.create(model="m", messages=[*task.prompt])  # type: ignore[list-item]
        metric = Metric("colour", "trajectory", "mean")
        reward = float(task.extras["reward"])
        return Graded(Reward.of(reward), measured("trajectory", {metric: [3]}), "beware")


async def call_over_http(*extras: dict[str, Any], **settings: Any) -> tuple[list[Trajectory], list[str]]:
    urls: list[str] = []

    async def agent(task: Task, client: AsyncOpenAI) -> float:
        urls.append(str(client.base_url))
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        return 1.0

    players = Players({}, {"agent": agent}, {"a": partial(Calling, urls=urls), "b": partial(Calling, urls=urls)})
    tasks = [Task(f"t{n}", HELLO, driver="ab"[n % 2], extras=extra) for n, extra in enumerate(extras)]
    config = RolloutConfig(max_completion_tokens=16, max_steps=2, **settings)
    async with open_rollouts(saying("a"), plain_renderer(), players, config) as rollouts:
        running = [
            rollouts.start(f"g{n}", task, [Address(1, Stream.TRAIN, 0, n, 0)])[0]
            for n, task in enumerate([*tasks, Task("agent", HELLO, agent="agent")])
        ]
        return list(await asyncio.gather(*running)), urls


async def test_all_that_calls_over_http_shares_one_gateway() -> None:
    """A second one could not have the configured port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trajectories, urls = await call_over_http(
        {"calls": 1, "reward": 0.5}, {"calls": 2, "reward": 0.25}, gateway=GatewayConfig(port=port)
    )
    assert [t.reward for t in trajectories] == [0.5, 0.25, 1.0], [t.failure for t in trajectories]
    assert len(set(urls)) == 3 and {urlsplit(url).port for url in urls} == {port}
    assert [len(t.steps) for t in trajectories] == [1, 2, 1]
    assert dict(trajectories[0].metrics) == {"colour": 3} and trajectories[0].warning == "beware"
