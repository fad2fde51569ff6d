"""What an attempt needs is down: it fails by infrastructure wherever that is said, and no model reads or earns it."""

import asyncio
from typing import Any

import pytest

from tests.envs.test_tools import call, played
from tests.worlds import MORE, Told, user
from treadle import EnvStep, InfrastructureError, ToolEnvironment
from treadle.core.errors import Cause, TrajectoryFailure
from treadle.core.types import Failure
from treadle.envs.tasks import SingleTurn
from treadle.loop.failures import FailuresConfig
from treadle.rollout.isolation.user_code import attributed
from treadle.workers.confined import ChildPool

DOWN = "search is down"


def search(query: str) -> str:
    """Search."""
    raise InfrastructureError(DOWN)


class Plain(ToolEnvironment):
    tools = (search,)


class Wrapped(ToolEnvironment):
    """Raises within a group, as asyncio.TaskGroup does."""

    async def search(self, query: str) -> str:
        """Search."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.ask())
            group.create_task(asyncio.Event().wait())
        return "never"

    async def ask(self) -> None:
        raise InfrastructureError(DOWN)

    tools = (search,)


class Async(ToolEnvironment):
    async def search(self, query: str) -> str:
        """Search."""
        return search(query)

    tools = (search,)


class Grading(ToolEnvironment):
    def answered(self, text: str) -> float:
        raise InfrastructureError(DOWN)


@pytest.mark.parametrize(
    "world",
    [
        Plain,
        Async,
        Wrapped,
        Grading,
        lambda: Told(opening=InfrastructureError(DOWN)),
        lambda: Told(MORE, InfrastructureError(DOWN)),
        lambda: SingleTurn(lambda task, text: float(search(text))),
    ],
)
def test_an_attempt_is_played_again_and_earns_nothing(world: Any) -> None:
    reply = "I give up." if world is Grading else call("search", query="tea")
    trajectory = played(world, reply, reply)
    assert trajectory.reward is None and isinstance(trajectory.failure, Failure)
    assert (trajectory.failure.cause, trajectory.failure.message) == (Cause.INFRASTRUCTURE, DOWN)
    assert FailuresConfig().retry_delay(trajectory, 1) == 1.0


def test_what_else_a_tool_raises_is_told_to_the_model() -> None:
    class Broken(ToolEnvironment):
        def search(self, query: str) -> str:
            """Search."""
            raise ExceptionGroup("two", [KeyError("a"), ValueError("b")])

        tools = (search,)

        def answered(self, text: str) -> EnvStep:
            return EnvStep([user("Go on.")]) if text == "?" else EnvStep(reward=1.0, done=True)

    assert played(Broken, call("search", query="tea"), "done").reward == 1.0


def test_the_first_failure_of_a_group_counts() -> None:
    inner = ExceptionGroup("b", [ValueError("x"), TrajectoryFailure(Cause.VERIFIER, "no report")])
    failure = attributed(
        BaseExceptionGroup("a", [KeyError("k"), inner, InfrastructureError(DOWN)]), "step", Cause.AGENT
    )
    assert (failure.cause, failure.message) == (Cause.VERIFIER, "no report")
    assert attributed(ExceptionGroup("a", [KeyError("k")]), "step", Cause.AGENT).cause is Cause.AGENT


def test_a_process_that_cannot_be_started_is_infrastructure() -> None:
    pool = ChildPool("SQL", ["/no/such/program"], children=1)
    with pytest.raises(InfrastructureError, match="a process for SQL did not start: "), pool.lease():
        raise AssertionError("there is none")
