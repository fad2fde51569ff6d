"""Drivers from outside: they need no change of Treadle, and end an attempt by the same table as its own."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from openai import APIStatusError, AsyncOpenAI

from tests.rollout.kit import ask, once, played
from tests.worlds import (
    CHATML,
    DONE,
    END,
    HELLO,
    MORE,
    PlainTokenizer,
    Told,
    addresses,
    hang,
    plain_ids,
    plain_renderer,
    saying,
    tool,
    user,
)
from treadle.core.errors import (
    Cause,
    ConfigError,
    ContextExceeded,
    DataError,
    EngineError,
    StepsExceeded,
    TokensExceeded,
    TrajectoryFailure,
)
from treadle.core.metrics import Metric, measured
from treadle.core.rewards import Reward
from treadle.core.types import Failure, Ids, SamplingParams, Status, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.rollout.agents.agent import Recovered
from treadle.rollout.agents.clients import async_client
from treadle.rollout.attempt import Players, open_rollouts
from treadle.rollout.config import GatewayConfig, RolloutConfig
from treadle.rollout.drivers.driver import AttemptDriver, DriverFactory, DriverSetup, check_driver
from treadle.rollout.drivers.gateway import AgentSession, GatewayDriver, Graded
from treadle.rollout.drivers.outcome import ATTEMPT_ERRORS, Outcome, outcome_of
from treadle.rollout.gateway.gateway import SessionAddress
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import Session, SessionSpec
from treadle.testing import FakeEngine, VirtualLoop

TASK = Task("t", HELLO, driver="mine")


async def driven(driver: DriverFactory, attempts: int = 1, **settings: Any) -> list[Trajectory]:
    """Attempts at one task by this driver; every session must be closed afterwards."""
    engine = saying("a")
    config, players = RolloutConfig(max_completion_tokens=16, **settings), Players(drivers={"mine": driver})
    async with open_rollouts(engine, plain_renderer(), players, config) as rollouts:
        running = rollouts.start("g", TASK, addresses(attempts))
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
    trajectories = asyncio.run(driven(Asking, attempts=3))
    assert [t.trajectory_id for t in trajectories] == ["g.0", "g.1", "g.2"]
    for trajectory in trajectories:
        assert (trajectory.status, trajectory.reward, len(trajectory.steps)) == (Status.DONE, 0.5, 1)


@pytest.mark.parametrize(
    ("error", "status", "cause"),
    [
        (ContextExceeded(9, 8), Status.CONTEXT, None),
        (StepsExceeded(3), Status.MAX_STEPS, None),
        (TokensExceeded(3), Status.MAX_STEPS, None),
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
    [trajectory] = asyncio.run(driven(raising(error)))
    message = error.message if isinstance(error, TrajectoryFailure) else str(error)
    expected = (status, 0.0, None) if cause is None else (Status.FAILED, None, Failure(cause, message))
    assert (trajectory.status, trajectory.reward, trajectory.failure) == expected
    assert len(trajectory.steps) == 1


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
        trajectories = runner.run(driven(OneAtATime, attempts=10, trajectory_timeout=10.0))
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

    asyncio.run(driven(Sharing, attempts=2))
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
        (Session, "'it' is not a subclass of AttemptDriver"),
        (
            TwoArguments,
            "'it' is made with a DriverSetup and, if any, its options_type, but: missing a required argument: 'more'",
        ),
    ],
)
def test_what_is_no_driver_is_refused(found: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_driver(found, "it")


async def test_all_that_calls_over_http_shares_one_gateway() -> None:
    """A second one could not have the configured port."""
    urls: list[str] = []

    class Calling(GatewayDriver):
        async def run(self, task: Task, session: AgentSession, address: SessionAddress, user: UserCode) -> Graded:
            urls.append(address.base_url)
            async with async_client(address.base_url, address.secret, 20.0) as client:
                await ask(client, [*task.prompt])
            return Graded(
                Reward.of(0.5), measured("trajectory", {Metric("colour", "trajectory", "mean"): [3]}), "beware"
            )

    with socket.create_server(("127.0.0.1", 0)) as probe:
        gateway = GatewayConfig(port=probe.getsockname()[1])
    players = Players({}, {"a": once}, {"a": Calling, "b": Calling})
    tasks = [Task("t", HELLO, driver="a"), Task("u", HELLO, driver="b"), Task("v", HELLO, agent="a")]
    trajectories = await played(players, saying("a"), tasks, gateway=gateway)
    assert [(t.reward, len(t.steps)) for t in trajectories] == [(0.5, 1), (0.5, 1), (1.0, 1)], trajectories
    assert len(set(urls)) == 2 and {urlsplit(url).port for url in urls} == {gateway.port}
    assert dict(trajectories[0].metrics) == {"colour": 3} and trajectories[0].warning == "beware"


# How an attempt ended, by who drove it and what happened: one table of status, cause, reward and warning


OTHER_TOKENS = Reward(tokens=np.array([1.0] * 7, np.float32))
HUGE = EnvStep([tool("x")], 1e12, done=True)
VERIFIER, GAVE_UP = TrajectoryFailure(Cause.VERIFIER, "no tests"), TrajectoryFailure(Cause.AGENT, "gave up")
NO_TESTS = Cause.VERIFIER, "no tests"
TOO_LONG = Cause.TIMEOUT, "(rollout.trajectory_timeout)"
REFUSED = Cause.AGENT, "no bad; an agent that continues without the answer returns treadle.Recovered(reward)"
OVER_IT = Recovered(Reward({"page": 0.5}))
MALFORMED = "1 of its requests were malformed, the first: messages"
REFUSING = f"{{% for m in messages if m.role == 'tool' %}}{{{{ raise_exception('no tools') }}}}{{% endfor %}}{CHATML}"
CHOOSY = f"{{% for m in messages if m.content == 'bad' %}}{{{{ raise_exception('no bad') }}}}{{% endfor %}}{CHATML}"


class Boom(Exception):
    pass


def failing(*calls: int) -> FakeEngine:
    """An engine that fails at these calls, counted from 1, and answers "a" otherwise."""

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        if len(engine.calls) in calls:
            raise EngineError("out of memory")
        return [*plain_ids("a"), END]

    engine = FakeEngine(reply)
    return engine


def broken() -> Environment:
    raise Boom("no room")


def world(*answers: Any, **more: Any) -> Callable[[], Environment]:
    return lambda: Told(*answers, **more)


IMAGE: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
Turn = Callable[[AsyncOpenAI], Any]


def agent(*turns: str, returns: Any = 1.0, caught: int = 0) -> Any:
    """Asks each turn by itself ("" is an image), then returns, raises or awaits `returns`.

    caught: errors of calls that it gets over.
    """

    async def play(task: Task, client: AsyncOpenAI) -> Any:
        left = caught
        for turn in turns:
            try:
                await ask(client.with_options(max_retries=0), [user(turn)] if turn else [IMAGE])
            except APIStatusError:
                if not left:
                    raise
                left -= 1
        if isinstance(returns, BaseException):
            raise returns
        return await returns() if callable(returns) else returns

    return play


@dataclass(frozen=True)
class Row:
    """What plays, in what circumstances, and what its trajectory says. warning: what it begins with."""

    name: str
    player: Any
    status: Status
    reward: float | None
    cause: Cause | None = None
    message: str = ""
    warning: str = ""
    engine: Callable[[], FakeEngine] = lambda: saying("a")
    settings: tuple[tuple[str, Any], ...] = ()
    template: str = CHATML

    @property
    def is_agent(self) -> bool:
        return asyncio.iscoroutinefunction(self.player)


def failed(name: str, player: Any, cause: Cause, message: str, **more: Any) -> Row:
    return Row(name, player, Status.FAILED, None, cause, message, **more)


def limited(**settings: Any) -> dict[str, Any]:
    return {"settings": tuple(settings.items())}


LONG = "x" * 200
TIGHT = limited(max_input_tokens=80)
FIRST: dict[str, Any] = {"engine": lambda: failing(1)}
SECOND: dict[str, Any] = {"engine": lambda: failing(2)}
NO_MEMORY = Cause.ENGINE, "out of memory"
AT_LIMIT: dict[str, Any] = {"warning": "the agent raised BadRequestError"}
TABLE = [
    # an environment
    Row("it is done", world(MORE, DONE), Status.DONE, 1.25),
    Row("steps used up", world(*[MORE] * 9), Status.MAX_STEPS, 0.5, **limited(max_steps=2)),
    Row("a later prompt is too long", world(*[MORE] * 9), Status.CONTEXT, 0.75, **TIGHT),
    failed("the first prompt is too long", world(opening=[user(LONG)]), Cause.CONTEXT, "tokens,", **TIGHT),
    failed("the engine fails later", world(MORE, DONE), *NO_MEMORY, **SECOND),
    failed("the template refuses", world(MORE, DONE), Cause.ENVIRONMENT, "no tools", template=REFUSING),
    failed("it cannot be made", broken, Cause.ENVIRONMENT, "create raised Boom: no room"),
    failed("step raises", world(MORE, Boom("x")), Cause.ENVIRONMENT, "step raised Boom: x"),
    failed("step knows better", world(VERIFIER), Cause.VERIFIER, "no tests"),
    failed("step hangs", world(hang), Cause.TIMEOUT, "step took longer", **limited(environment_timeout=0.05)),
    failed("it exits", world(SystemExit(3)), Cause.ENVIRONMENT, "step tried to exit"),
    failed("a reward of other tokens", world(EnvStep(reward=OTHER_TOKENS, done=True)), Cause.ENVIRONMENT, "7 tokens"),
    failed("rewards too large", world(HUGE._replace(done=False), HUGE), Cause.ENVIRONMENT, "the steps' rewards add up"),
    Row("close raises", world(DONE, closing=Boom("x")), Status.DONE, 1.0, warning="close raised Boom: x"),
    failed(
        "all raises", world(Boom("x"), closing=Boom("y")), Cause.ENVIRONMENT, "step raised Boom: x", warning="close"
    ),
    failed("its attempt takes too long", world(hang), *TOO_LONG, **limited(trajectory_timeout=0.2)),
    # an agent program
    Row("it returns", agent("x", "y"), Status.DONE, 1.0),
    Row("it raises at the limit", agent("x", "y", "z"), Status.MAX_STEPS, 0.0, **AT_LIMIT, **limited(max_steps=2)),
    Row("it returns after it", agent("x", "y", caught=1), Status.MAX_STEPS, 1.0, **limited(max_steps=1)),
    Row("it raises for a long prompt", agent("x", LONG), Status.CONTEXT, 0.0, **AT_LIMIT, **TIGHT),
    Row("it returns after one", agent("x", LONG, caught=1), Status.CONTEXT, 1.0, **TIGHT),
    Row("it makes do with a shorter one", agent(LONG, "x", caught=1), Status.DONE, 1.0, **TIGHT),
    failed("it raises for a long first prompt", agent(LONG), Cause.CONTEXT, "tokens,", **TIGHT),
    failed("it returns after a long first one", agent(LONG, caught=1), Cause.CONTEXT, "tokens,", **TIGHT),
    Row("it gives up", agent("x", LONG, caught=1, returns=GAVE_UP), Status.CONTEXT, 0.0, warning="gave up", **TIGHT),
    failed("it raises as the engine fails later", agent("x", "y"), *NO_MEMORY, **SECOND),
    failed("it raises for want of an answer", agent("x", "y", caught=1, returns=Boom("x")), *NO_MEMORY, **FIRST),
    failed("a limit after a failure", agent(*"xyzw", caught=1), *NO_MEMORY, **{**SECOND, **limited(max_steps=2)}),
    Row("it asks again", agent("x", "x", caught=1), Status.DONE, 1.0, **FIRST),
    Row("a failed call is no step", agent(*"xxy", caught=1), Status.DONE, 1.0, **FIRST, **limited(max_steps=2)),
    failed("it swallows a failure", agent("x", "y", caught=1), *NO_MEMORY, **SECOND),
    Row("it gets over one", agent("x", "y", caught=1, returns=Recovered(0.5)), Status.DONE, 0.5, **SECOND),
    failed("it swallows a refusal", agent("x", "bad", caught=1, returns=0.0), *REFUSED, template=CHOOSY),
    Row("it gets over one, too", agent("x", "bad", caught=1, returns=OVER_IT), Status.DONE, 0.5, template=CHOOSY),
    Row("it sends what nobody takes", agent("x", "", caught=1, returns=0.0), Status.DONE, 0.0, warning=MALFORMED),
    failed("no number, recovered", agent("x", returns=Recovered(None)), Cause.AGENT, "the agent returned None"),  # type: ignore[arg-type]
    failed("it knows better than the engine", agent("x", caught=1, returns=VERIFIER), *NO_TESTS, **FIRST),
    failed("it raises", agent("x", returns=Boom("bang \ud800")), Cause.AGENT, "the agent raised Boom: bang \\ud800"),
    failed("it exits", agent("x", returns=SystemExit(3)), Cause.AGENT, "the agent tried to exit the process (3)"),
    failed("it knows better", agent("x", returns=VERIFIER), *NO_TESTS),
    failed("no number", agent("x", returns=None), Cause.AGENT, "the agent returned None"),
    failed("not a number", agent("x", returns=float("nan")), Cause.AGENT, "the agent returned nan"),
    failed("it never asks", agent(), Cause.AGENT, "without an answer of the model"),
    failed("it rewards other tokens", agent("x", returns=OTHER_TOKENS), Cause.AGENT, "the agent's reward: "),
    failed("it hangs", agent("x", returns=hang), Cause.TIMEOUT, "the agent took longer", **limited(agent_timeout=1.0)),
    failed("its attempt takes too long", agent("x", returns=hang), *TOO_LONG, **limited(trajectory_timeout=1.0)),
]


def play(row: Row) -> Trajectory:
    task = Task("t", HELLO, agent="a") if row.is_agent else Task("t", environment="e")
    worlds, agents = ({}, {"a": row.player}) if row.is_agent else ({"e": row.player}, {})
    tokenizer = PlainTokenizer(row.template)
    [trajectory] = asyncio.run(played(agents, row.engine(), [task], worlds, tokenizer, **dict(row.settings)))
    return trajectory


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{'agent' if row.is_agent else 'environment'}: {row.name}")
def test_what_happened_decides_what_the_trajectory_says(row: Row) -> None:
    trajectory = play(row)
    failure = trajectory.failure
    assert (trajectory.status, trajectory.reward) == (row.status, row.reward), failure
    assert (None if failure is None else failure.cause) == row.cause
    assert failure is None or row.message in failure.message
    assert trajectory.warning.startswith(row.warning) and bool(trajectory.warning) == bool(row.warning)
    if row.is_agent:
        assert trajectory.metrics.get("bad_requests", 0) == ("malformed" in row.warning)
