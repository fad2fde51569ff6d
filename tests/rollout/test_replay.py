"""Attempts that go on with recorded calls: the same trajectory, and only what is missing is sampled."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from tests.rollout.kit import ask, attempt, by_seed
from tests.worlds import tool, user
from treadle.core.engine import Completion
from treadle.core.errors import Cause
from treadle.core.types import Ids, Message, SamplingParams, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.rollout.replay import AnsweredCall
from treadle.rollout.session import Address
from treadle.testing import FakeEngine

CALLS = 20


class Log:
    """A `CallLog` in memory. side_by_side: most calls that the player makes at a time."""

    def __init__(self, calls: Sequence[AnsweredCall] = (), side_by_side: int = 1) -> None:
        self.calls, self.said = list(calls), list[str]()
        self.durable, self._side_by_side = len(calls), side_by_side

    def recorded(self, address: Address) -> Sequence[AnsweredCall]:
        return tuple(self.calls)

    def add(self, address: Address, call: AnsweredCall) -> "asyncio.Future[None]":
        self.calls.append(call)
        assert len(self.calls) - self.durable <= self._side_by_side, "more than one could be lost"
        return asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        await asyncio.sleep(0.001)
        self.durable = len(self.calls)

    def forget(self, address: Address) -> None:
        self.calls.clear()

    def restarted(self, address: Address, player: str, what: str) -> None:
        self.forget(address)
        self.said.append(f"{player}: {what}")


class Echoing(Environment):
    """CALLS replies, each answered with its length; the reward is their number. instances: all that were made."""

    instances: ClassVar[list["Echoing"]] = []

    def __init__(self) -> None:
        self.closed, self.replies = False, 0
        self.instances.append(self)

    async def step(self, text: str) -> EnvStep:
        self.replies += 1
        return EnvStep(self.answers(text), 1.0, self.replies == CALLS)

    def answers(self, text: str) -> list[Message]:
        return [tool(f"{len(text)}")]

    async def close(self) -> None:
        self.closed = True


class Unlike(Echoing):
    """After the tenth reply, the second instance says something else."""

    def answers(self, text: str) -> list[Message]:
        return [tool(f"{len(text)}" + ("!" * len(self.instances) if self.replies == 10 else ""))]


class Unreplayable(Echoing):
    replayable = False


async def chatting(task: Task, client: AsyncOpenAI) -> float:
    """CALLS calls, of which the last three are made side by side."""
    talk: list[Any] = [user("hello")]
    for _ in range(CALLS - 3):
        talk += [Message(role="assistant", content=await ask(client, talk)), user("go on")]
    await asyncio.gather(*(ask(client, [*talk[:-1], user(f"part {n}")]) for n in range(3)))
    return 1.0


class Pinning(FakeEngine):
    """Means to sample a session by one version; after `held` answers it is another's turn. version: the first."""

    def __init__(self, version: int = 0, held: int = 1000) -> None:
        super().__init__(by_seed)
        self.version, self._held = version, held

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        if len(self.calls) == self._held:
            await self.publish(self.version + 1)
        completion = await super().generate(prompt_ids, sampling, session=session, **more)
        return replace(completion, pinned=True)


def played(player: Any, log: Log | None, engine: FakeEngine | None = None) -> tuple[Trajectory, int]:
    """An attempt, and how many of its calls the engine answered. engine: default: one that does not fail it."""
    sampling = engine or FakeEngine(by_seed)
    trajectory = asyncio.run(attempt(player, sampling, log=log, max_steps=CALLS, max_input_tokens=10_000))
    assert engine or trajectory.failure is None, trajectory.failure
    return trajectory, len(sampling.calls)


def content(trajectory: Trajectory) -> Any:
    return trajectory.reward, [
        (s.prompt_ids.tolist(), s.completion_ids.tolist(), s.logprobs.tolist(), s.policy_versions.tolist(), s.sampling)
        for s in trajectory.steps
    ]


@settings(max_examples=10)
@given(st.integers(0, CALLS))
def test_only_the_calls_that_are_missing_are_sampled(kept: int) -> None:
    expected, calls = played(Echoing, log := Log())
    assert calls == len(log.calls) == CALLS
    again, calls = played(Echoing, replayed := Log(log.calls[:kept]))
    assert content(again) == content(expected)
    assert calls == CALLS - kept
    assert [call.number for call in replayed.calls] == list(range(CALLS))
    assert not replayed.said


def test_another_request_starts_the_attempt_anew_and_nothing_is_mixed() -> None:
    Echoing.instances.clear()
    before, _ = played(Unlike, log := Log())
    after, calls = played(Unlike, log)
    assert [made.closed for made in Echoing.instances] == [True] * 3
    assert log.said == ["environment 'p': task t, trajectory g0.0, call 10"]
    assert calls == len(after.steps) == len(log.calls) == CALLS
    [third] = [made for made in Echoing.instances[2:]]
    assert third.replies == CALLS
    fresh, _ = played(Unlike, None)
    assert len({len(t.steps[10].prompt_ids) for t in (before, after, fresh)}) == 3  # of three instances


def test_where_it_is_not_allowed_nothing_is_recorded() -> None:
    trajectory, calls = played(Unreplayable, log := Log())
    assert (len(trajectory.steps), calls, log.calls) == (CALLS, CALLS, [])


def test_an_agent_gets_the_recorded_answers_over_http_in_whatever_order_it_asks() -> None:
    expected, calls = played(chatting, log := Log(side_by_side=3))
    assert calls == len(log.calls) == CALLS
    prompts = {(tuple(s.prompt_ids.tolist()), tuple(s.completion_ids.tolist()), s.sampling) for s in expected.steps}
    *others, first, second, third = sorted(log.calls, key=lambda call: call.number)
    shuffled = [AnsweredCall(n, c.request, c.completion) for n, c in enumerate([*others, third, first, second])]
    for record, sampled in ((log.calls, 0), (log.calls[: CALLS - 3], 3), (shuffled, 0)):
        replayed = Log(record, side_by_side=3)
        again, calls = played(chatting, replayed)
        assert (calls, replayed.said) == (sampled, [])
        if record is not shuffled:
            assert {
                (tuple(s.prompt_ids.tolist()), tuple(s.completion_ids.tolist()), s.sampling) for s in again.steps
            } == prompts


def test_an_agent_that_asks_otherwise_is_cut_off_and_starts_anew() -> None:
    async def unlike(task: Task, client: AsyncOpenAI) -> float:
        times.append(1)
        await ask(client, [user("hello")])
        await ask(client, [user("again" * len(times))])
        return float(len(times))

    times: list[int] = []
    played(unlike, log := Log())
    after, calls = played(unlike, log)
    assert (calls, len(after.steps), after.reward) == (2, 2, 3.0)
    assert log.said == ["agent 'p': task t, trajectory g0.0, call 1"]


# Engines that pin sessions


def versions(trajectory: Trajectory) -> set[int]:
    return {int(version) for step in trajectory.steps for version in step.policy_versions}


@pytest.mark.parametrize(("player", "kept"), [*((Echoing, n) for n in (1, 7, CALLS)), (chatting, CALLS - 3)])
def test_recorded_calls_of_a_version_that_the_engine_lacks_are_forgotten(player: Any, kept: int) -> None:
    """Those of a whole attempt need no engine."""
    played(player, log := Log(side_by_side=3))
    again, calls = played(player, replayed := Log(log.calls[:kept], 3), Pinning(version=3))
    assert (again.failure, again.reward, len(again.steps)) == (None, 20.0 if player is Echoing else 1.0, CALLS)
    assert versions(again) == ({0} if kept == CALLS else {3})
    assert sorted(call.number for call in replayed.calls) == list(range(CALLS))
    assert {span.version for call in replayed.calls for span in call.completion.policy_versions} == versions(again)
    assert not replayed.said  # the player is not to blame
    same, calls = played(player, Log(log.calls[:kept], 3), Pinning())
    assert (versions(same), calls) == ({0}, CALLS - kept)


@pytest.mark.parametrize(("player", "held"), [(Echoing, 1), (Unreplayable, 9)])
def test_an_attempt_whose_version_the_engine_lost_fails_of_that(player: Any, held: int) -> None:
    trajectory, _ = played(player, Log(), Pinning(held=held))
    assert trajectory.failure is not None and trajectory.failure.cause is Cause.ENGINE
    assert "was sampled by version 1 and earlier steps by version 0" in trajectory.failure.message
    assert (trajectory.reward, len(trajectory.steps), versions(trajectory)) == (None, held, {0})


def test_a_version_that_is_lost_amid_a_resumed_attempt_is_no_failure() -> None:
    """Its calls are of the recorded version for a while; played anew it has the next one alone."""
    played(Echoing, log := Log())
    again, calls = played(Echoing, replayed := Log(log.calls[:5]), Pinning(held=4))
    assert (again.failure, versions(again), calls) == (None, {1}, 4 + 1 + CALLS)
    assert [call.number for call in replayed.calls] == list(range(CALLS))


def test_an_engine_that_does_not_pin_may_sample_by_several_versions() -> None:
    engine = FakeEngine(by_seed)
    engine.version = 1
    played(Echoing, log := Log())
    again, calls = played(Echoing, Log(log.calls[:5]), engine)
    assert (versions(again), calls) == ({0, 1}, CALLS - 5)
