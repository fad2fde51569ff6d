"""Demonstrations that nobody writes: an environment's tools, called at random."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.worlds import user
from treadle.core.errors import Cause, ConfigError, DataError, TrajectoryFailure
from treadle.core.types import Task
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tools import ToolEnvironment
from treadle.rollout.config import RolloutConfig
from treadle.rollout.random_calls import RandomAttempt, calls_of_tools, play_all_at_random

PRICES = {"tea": 12, "milk": 7}
TASKS = [Task(item, (user(f"What do 3 {item} cost?"),), environment="world") for item in PRICES]


class Shop(ToolEnvironment):
    def price(self, item: str) -> int:
        """Look up what an item costs."""
        return PRICES[item]

    tools = (price,)


def played(world: Any, count: int = 200, seed: int = 0, max_steps: int = 4) -> list[RandomAttempt]:
    config = RolloutConfig(max_steps=max_steps)
    return asyncio.run(play_all_at_random(TASKS, {"world": world}, config, seed, count))


def calls(attempt: RandomAttempt) -> list[dict[str, Any]]:
    return [json.loads(c["function"]["arguments"]) for m in attempt.messages for c in m.get("tool_calls", ())]


def test_calls_that_work_are_played_and_answered() -> None:
    attempts = played(Shop)
    assert len(attempts) == 200
    for attempt, task in zip(attempts, TASKS * 100, strict=True):
        assert attempt.messages[0] == task.prompt[0]
        assert attempt.messages[-1]["role"] == "assistant" and attempt.messages[-1]["content"]
        assert calls(attempt) == [{"item": task.task_id}] * len(calls(attempt))  # of all words, the one that works
        told = [message["content"] for message in attempt.messages if message["role"] == "tool"]
        assert told == [str(PRICES[task.task_id])] * len(calls(attempt))
    assert {len(calls(attempt)) for attempt in attempts} == {0, 1, 2, 3}
    right = [a.messages[-1]["content"] == str(PRICES[t.task_id]) for a, t in zip(attempts, TASKS * 100, strict=True)]
    assert 20 < sum(right) < 120  # by chance, and not always


def test_names_of_several_words_and_of_an_owner_are_found() -> None:
    class Staff(ToolEnvironment):
        def phone(self, name: str) -> str:
            """Look up a number."""
            return {"Anna Miller": "12 34 56"}[name]

        tools = (phone,)

    task = Task("t", (user("What is Anna Miller's number?"),), environment="world")
    attempts = asyncio.run(play_all_at_random([task], {"world": Staff}, RolloutConfig(max_steps=2), 0, 200))
    assert calls_of_tools(attempts)["phone"] > 50
    answers = [attempt.messages[-1]["content"] for attempt in attempts if calls(attempt)]
    assert answers.count("12 34 56") > 10


def test_the_same_seed_gives_the_same_and_another_others() -> None:
    assert played(Shop) == played(Shop) != played(Shop, seed=1)


class Size(BaseModel):
    width: float
    unit: Literal["cm", "m"]


def test_arguments_fit_every_schema() -> None:
    class Many(ToolEnvironment):
        def order(
            self, size: Size, colours: list[str], count: int, wrapped: bool, note: str | None, kind: Literal["a"] = "a"
        ) -> str:
            """Order something."""
            return "ordered"

        tools = (order,)

    attempts = played(Many)
    made = [arguments for attempt in attempts for arguments in calls(attempt)]
    assert len(made) > 100
    assert not any(attempt.failed for attempt in attempts)
    assert {"kind" in arguments for arguments in made} == {True, False}  # what has a default
    assert {arguments["count"] for arguments in made} == {3}  # the number in the question
    assert {arguments["note"] is None for arguments in made} == {True, False}


def test_a_tool_that_ends_the_attempt_ends_the_demonstration() -> None:
    class Pay(ToolEnvironment):
        def pay(self, amount: float) -> EnvStep:
            """Pay."""
            return EnvStep(reward=1.0, done=True)

        tools = (pay,)

    attempts = played(Pay)
    assert {len(calls(attempt)) for attempt in attempts} == {0, 1}
    assert all("tool_calls" in a.messages[-1] or not calls(a) for a in attempts)


def test_an_environment_without_tools_is_refused() -> None:
    class Plain(Environment):
        async def step(self, text: str) -> EnvStep:
            return EnvStep(done=True)

    with pytest.raises(ConfigError, match=r"random_calls, but environment 'world' has no tools to call"):
        played(Plain)


def broken(error: Exception) -> type[ToolEnvironment]:
    class Broken(ToolEnvironment):
        def look(self, what: str) -> str:
            """Look."""
            raise error

        tools = (look,)

    return Broken


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no light"), "no light"), (TrajectoryFailure(Cause.INFRASTRUCTURE, "no server"), "no server")],
)
def test_tools_that_never_work_are_said(error: Exception, said: str) -> None:
    with pytest.raises(DataError, match=rf"in 50 attempts no call of a tool worked; .*{said}.*Name a generator"):
        played(broken(error), count=50)


def test_an_attempt_that_fails_is_left_out() -> None:
    class Some(Shop):
        def reset(self, task: Task) -> Sequence[Any]:
            if task.task_id == "milk":
                raise TrajectoryFailure(Cause.INFRASTRUCTURE, "no milk")
            self.task = task
            return task.prompt

    assert {attempt.messages[0]["content"] for attempt in played(Some)} == {"What do 3 tea cost?"}


def test_a_tool_that_never_works_stops_with_its_last_error_beside_one_that_does() -> None:
    class Half(Shop):
        def order(self, item: str) -> str:
            """Order an item."""
            return self.stock[item]  # type: ignore[attr-defined, no-any-return]

        tools = (Shop.price, order)  # type: ignore[assignment]

    with pytest.raises(DataError, match=r"none of \d+ calls of tool 'order' worked, .*: AttributeError: .*'stock'"):
        played(Half)
