"""One attempt, and several side by side: every failure is attributed, and touches nobody else."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clocks import StuckLoop
from tests.worlds import (
    DONE,
    END,
    MORE,
    PLAIN,
    Ragged,
    Told,
    ToldPlain,
    addresses,
    chatml,
    hang,
    one,
    plain_ids,
    plain_rollouts,
    play,
    saying,
    tool,
    user,
)
from treadle.core.errors import Cause
from treadle.core.types import DropReason, Ids, Message, SamplingParams, Status, Task
from treadle.envs.base import Environment, EnvStep
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.environment import EnvironmentDriver
from treadle.rollout.drivers.outcome import Outcome
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.session import Session
from treadle.testing import FakeEngine, VirtualLoop

# Attempts that go well


def test_an_attempt_is_its_steps_their_rewards_and_how_it_ended() -> None:
    world = Told(MORE, EnvStep([tool("x"), user("y")], 0.5), DONE)
    trajectory = one(world)
    assert world.calls == ["reset", "step", "step", "step", "close"]
    assert (trajectory.trajectory_id, trajectory.task_id, trajectory.attempt) == ("g000000.0", "t", 0)
    assert trajectory.status is Status.DONE
    assert trajectory.failure is None
    assert trajectory.warning == ""
    assert trajectory.reward == 1.75
    assert [s.reward for s in trajectory.steps] == [0.25, 0.5, 1.0]
    conversation = [user("hello"), *_turn(tool("more")), *_turn(tool("x"), user("y"))]
    assert trajectory.steps[2].prompt_ids.tolist() == plain_ids(chatml(conversation))
    assert trajectory.seconds > 0


def _turn(*observations: Message) -> list[Message]:
    return [Message(role="assistant", content="a"), *observations]


def test_a_state_is_of_the_step_that_follows_and_recorded_by_a_hash() -> None:
    states = ("kitchen \ud800", "", "hall", "kitchen \ud800")
    steps = one(Told(*[EnvStep([tool("x")], state=state) for state in states], DONE)).steps
    first, kitchen, unnamed, hall, again = (step.state_key for step in steps)
    assert first == unnamed == ""
    assert kitchen == again != hall
    assert len(kitchen) == len(hall) == 32


# Limits


observed = st.lists(st.text("xyz ", max_size=30), min_size=1, max_size=4)


@given(observed, st.integers(1, 200), st.integers(1, 6), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_no_call_outgrows_the_limits(observations: list[str], longest: int, most: int, sampled: list[int]) -> None:
    """The status, the reward and every prompt's length follow from the lengths of what was said."""
    task = Task("t", (user("go"),), "world", extras={"turns": 5, "rewards": [1.0] * 5, "observations": observations})
    lengths = [min(sampled[n % len(sampled)], most) for n in range(5)]
    engine = FakeEngine(lambda prompt, sampling: plain_ids("x") * sampled[(len(engine.calls) - 1) % len(sampled)])
    [trajectory] = play(Ragged, engine, task, max_steps=8, max_input_tokens=longest, max_completion_tokens=most)
    prompts = [len(plain_ids(chatml([user("go")])))]
    for number in range(4):
        text = "<|im_end|>\n" + chatml([tool(observations[number % len(observations)])])
        prompts.append(prompts[-1] + lengths[number] + len(plain_ids(text)))
    fitting = next((n for n, length in enumerate(prompts) if length > longest), 5)
    assert [len(s.prompt_ids) for s in trajectory.steps] == prompts[:fitting]
    for step in trajectory.steps:
        assert len(step.prompt_ids) <= longest
        assert len(step.prompt_ids) + len(step.completion_ids) <= longest + most
    if fitting == 0:
        assert trajectory.status is Status.FAILED
        assert trajectory.failure is not None
        assert trajectory.failure.cause is Cause.CONTEXT
        assert f"{prompts[0]} tokens, max_input_tokens is {longest}" in trajectory.failure.message
        assert (trajectory.steps, trajectory.reward) == ((), None)
    else:
        assert trajectory.status is (Status.DONE if fitting == 5 else Status.CONTEXT)
        assert trajectory.reward == fitting


# Attempts that fail


class Boom(Exception):
    pass


LIMIT = 0.2  # virtual seconds

FAILURES: list[tuple[Any, Cause, str, int]] = [
    # environment, cause, message, recorded steps
    (Told(opening=Boom("bang")), Cause.ENVIRONMENT, "reset raised Boom: bang", 0),
    (Told(opening=hang), Cause.TIMEOUT, "reset took longer than 0.2 s", 0),
    (Told(opening=[]), Cause.ENVIRONMENT, "reset gave no messages", 0),
    (Told(opening="hello"), Cause.ENVIRONMENT, "must be a list of messages, got str", 0),
    (Told(opening=[{"role": "user"}]), Cause.ENVIRONMENT, "message 0 needs 'role' and 'content'", 0),
    (Told(opening=[user("lone \ud800 surrogate")]), Cause.ENVIRONMENT, "reset must give messages", 0),
    (Told(MORE, Boom("bang")), Cause.ENVIRONMENT, "step raised Boom: bang", 2),
    (Told(asyncio.CancelledError()), Cause.ENVIRONMENT, "step raised CancelledError", 1),
    (Told(Boom("bang \ud800")), Cause.ENVIRONMENT, "step raised Boom: bang \\ud800", 1),
    (Told(MORE, hang), Cause.TIMEOUT, "step took longer than 0.2 s", 2),
    (
        Told(None),
        Cause.ENVIRONMENT,
        "step must return EnvStep(observations, reward, done, info, state, history, rejected, rewards), got",
        1,
    ),
    (Told(([], 1.0)), Cause.ENVIRONMENT, "got ([], 1.0)", 1),
    (Told(EnvStep(reward=math.nan, done=True)), Cause.ENVIRONMENT, "the reward nan, a float, in tests.worlds:Told", 1),
    (Told(EnvStep(reward=10**400, done=True)), Cause.ENVIRONMENT, "it must be a finite number", 1),
    (Told(EnvStep(reward="1", done=True)), Cause.ENVIRONMENT, "the reward '1'", 1),  # type: ignore[arg-type]
    (Told(EnvStep(reward=1.0, done="yes")), Cause.ENVIRONMENT, "done='yes'; it must be true or false", 1),  # type: ignore[arg-type]
    (Told(EnvStep()), Cause.ENVIRONMENT, "step gave no messages for the agent to read, and is not done", 1),
    (Told(EnvStep("go on")), Cause.ENVIRONMENT, "step must give messages", 1),  # type: ignore[arg-type]
    (Told(EnvStep([tool("\udfff")])), Cause.ENVIRONMENT, "step must give messages", 1),
]


@pytest.mark.parametrize("kind", [Told, ToldPlain])
@pytest.mark.parametrize(("world", "cause", "message", "steps"), FAILURES, ids=[f[2][:40] for f in FAILURES])
def test_a_failure_is_attributed_and_leaves_its_siblings_alone(
    world: Told, cause: Cause, message: str, steps: int, kind: type[Told]
) -> None:
    loop = StuckLoop()
    hanging = hang if kind is Told else loop.stuck
    answers = [hanging if answer is hang else answer for answer in world.answers]
    failing = kind(*answers, opening=hanging if world.opening is hang else world.opening)
    before, failed, after = play(
        [lambda: Told(MORE, DONE), lambda: failing, lambda: Told(MORE, DONE)],
        saying("a"),
        loop=loop,
        environment_timeout=LIMIT,
    )
    loop.released.set()
    assert failed.status is Status.FAILED
    assert failed.reward is None
    assert failed.failure is not None
    assert failed.failure.cause is cause
    assert message in failed.failure.message
    assert len(failed.steps) == steps
    if hanging is hang or cause is not Cause.TIMEOUT:  # its thread closes the other one when it is free again
        assert failing.calls.count("close") == 1
        assert failing.calls[-1] == "close"
    for healthy in (before, after):
        assert (healthy.status, healthy.reward, len(healthy.steps)) == (Status.DONE, 1.25, 2)


@pytest.mark.parametrize("closing", [Boom("stuck"), hang])
def test_a_failing_close_takes_no_reward_away(closing: Any) -> None:
    world = Told(DONE, closing=closing)
    trajectory = one(world, loop=VirtualLoop(), environment_timeout=LIMIT)
    assert (trajectory.status, trajectory.reward, trajectory.failure) == (Status.DONE, 1.0, None)
    assert trajectory.warning == ("close took longer than 0.2 s" if closing is hang else "close raised Boom: stuck")
    assert world.calls.count("close") == 1


async def test_an_attempt_that_its_driver_cancels_fails() -> None:
    class Cancelling(EnvironmentDriver):
        async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
            raise asyncio.CancelledError

    rollouts = plain_rollouts(saying("a"), Told)
    rollouts._drivers = {("environment", "world"): Cancelling({}, RolloutConfig())}
    [playing] = rollouts.start("g", Task("t", (), "world"), addresses())
    failure = (await playing).failure
    assert failure is not None and failure.cause is Cause.INFRASTRUCTURE


def test_an_unexpected_exception_of_the_engine_is_no_trajectory_but_still_cleans_up() -> None:
    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        raise ZeroDivisionError

    engine, world = FakeEngine(reply), Told(DONE)
    with pytest.raises(ZeroDivisionError):
        one(world, engine)
    assert engine.open == []
    assert world.calls == ["reset", "close"]


# Single-message mode


def test_in_single_message_mode_observations_go_into_the_assistants_turn() -> None:
    worlds = Told(EnvStep([tool("one"), tool("two")]), EnvStep([tool("three")]), DONE)
    trajectory = one(worlds, saying("ab", end=False), conversation="single_message")
    prompts = [PLAIN.decode(step.prompt_ids) for step in trajectory.steps]
    opening = chatml([user("hello")])
    assert prompts == [opening, opening + "abonetwo", opening + "abonetwoabthree"]
    for step, following in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        assert following.prompt_ids[: len(step.full_ids)].tolist() == step.full_ids.tolist()


@pytest.mark.parametrize("conversation", ["turns", "single_message"])
def test_an_environment_reads_a_reply_with_the_stop_string_that_ended_it(conversation: str) -> None:
    """Tags such as </sql> are what tells it what to do."""
    texts: list[str] = []

    class Listening(Environment):
        def reset(self, task: Task) -> Sequence[Message]:
            return [user("hello")]

        def step(self, text: str) -> EnvStep:
            texts.append(text)
            return EnvStep([tool("one")], done=len(texts) == 2)

    trajectory = one(Listening(), saying("ab", end=False), conversation=conversation, stop=("b",))
    assert texts == ["ab", "ab"]
    assert [PLAIN.decode(step.completion_ids) for step in trajectory.steps] == texts


# Cancellation


@pytest.mark.parametrize("ticks", range(8))
def test_cancelled_attempts_close_their_sessions_and_environments(ticks: int) -> None:
    """Whenever it comes: before the first tick, in `reset`, in the engine, in `step`."""
    made: list[Told] = []

    def make() -> Told:
        made.append(Told(hang) if len(made) % 2 else Told(opening=hang))
        return made[-1]

    async def cancel() -> FakeEngine:
        engine = saying("a")
        rollouts = plain_rollouts(engine, make)
        task = Task("t", environment="world")
        group = asyncio.gather(*rollouts.start("g", task, addresses(4)))
        for _ in range(ticks):
            await asyncio.sleep(0)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        await _settled()
        return engine

    engine = asyncio.run(cancel())
    assert engine.open == []
    assert [w.calls.count("close") for w in made] == [1] * len(made)
    assert len(made) == (4 if ticks else 0)


async def _settled() -> None:
    """Whatever was cancelled has ended."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


# The boundary itself


def test_a_timed_out_call_is_cancelled_before_the_environment_is_closed() -> None:
    async def slow() -> None:
        try:
            await hang()
        finally:
            world.calls.append("cancelled")

    world = Told(slow)
    one(world, loop=VirtualLoop(), environment_timeout=LIMIT)
    assert world.calls == ["reset", "step", "cancelled", "close"]


def test_an_attempt_whose_engine_does_not_answer_fails_of_time() -> None:
    """Its session is closed, its environment too, and the step that never came is on record as dropped."""
    engine = FakeEngine(lambda prompt, sampling: [END], delay=lambda: 3600.0)
    world = Told(EnvStep(reward=1.0, done=True))
    [trajectory] = play(lambda: world, engine, loop=VirtualLoop(), trajectory_timeout=0.05)
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.TIMEOUT
    assert "took longer than 0.05 s (rollout.trajectory_timeout)" in trajectory.failure.message
    assert [step.dropped for step in trajectory.steps] == [DropReason.CANCELLED]
    assert world.calls == ["reset", "close"] and engine.aborted == 1


async def test_a_reply_that_the_task_begins_goes_on() -> None:
    opening = [user("sum?"), Message(role="assistant", content="The sum is")]

    def world() -> Told:
        return Told(EnvStep([tool("more")]), EnvStep(reward=1.0, done=True), opening=opening)

    rollouts = plain_rollouts(saying(" ab"), world)
    [playing] = rollouts.start("g0", Task("t", environment="world"), addresses())
    first, second = (await playing).steps
    assert str(PLAIN.decode(first.prompt_ids)).endswith("assistant\nThe sum is")
    assert "assistant\nThe sum is ab<|im_end|>\n<|im_start|>tool\nmore" in PLAIN.decode(second.prompt_ids)
    assert second.break_cause is None
    assert (second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids).all()
