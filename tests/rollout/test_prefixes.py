"""Attempts that begin with the steps of a recorded one: context, never trained, and the rest sampled as its own."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from tests.rollout.kit import ask, attempt, by_seed
from tests.rollout.test_replay import CALLS, Echoing, Log, Unreplayable, chatting, content
from tests.worlds import make_step, tool, user
from treadle.core.errors import DataError
from treadle.core.outcomes import as_played, as_trained, dropped_steps
from treadle.core.types import (
    DropReason,
    Group,
    Message,
    ModelCall,
    SamplingParams,
    Start,
    Status,
    Step,
    Task,
    Trajectory,
)
from treadle.envs.base import Environment, EnvStep
from treadle.packing.flat import calls, flatten
from treadle.record.image_files import name_of
from treadle.record.rollout_store import step_of, step_row
from treadle.rollout.config import StartsConfig
from treadle.rollout.replay import Prefix
from treadle.testing import FakeEngine


def by_other_seed(prompt: Any, sampling: SamplingParams) -> list[int]:
    """As another attempt of the same place in another update would sample."""
    return by_seed(prompt, replace(sampling, seed=sampling.seed ^ 1))


def played(player: Any, prefix: Prefix | None = None, log: Log | None = None) -> tuple[Trajectory, int]:
    """An attempt, and how many of its calls the engine answered."""
    engine = FakeEngine(by_seed if prefix is None else by_other_seed)
    engine.version = 0 if prefix is None else 3
    whole = attempt(player, engine, log=log, prefix=prefix, max_steps=CALLS, max_input_tokens=10_000)
    trajectory = asyncio.run(whole)
    assert trajectory.failure is None, trajectory.failure
    return trajectory, len(engine.calls)


def prefix_of(trajectory: Trajectory, count: int) -> Prefix:
    return Prefix.of("g000007.2", trajectory.steps, count)


def ids(steps: Sequence[Step]) -> list[tuple[list[int], list[int]]]:
    return [(step.prompt_ids.tolist(), step.completion_ids.tolist()) for step in steps]


def as_group(*trajectories: Trajectory) -> Group:
    return Group("g000009", 9, 0, 0, Task("t", environment="p"), trajectories)


@pytest.mark.parametrize("count", [1, 7, CALLS - 1])
def test_an_attempt_goes_on_from_recorded_steps_which_are_not_trained(count: int) -> None:
    source, _ = played(Echoing)
    new, sampled = played(Echoing, prefix_of(source, count))
    assert new.start == Start("g000007.2", count)
    assert (sampled, len(new.steps), new.reward) == (CALLS - count, CALLS, float(CALLS))
    assert ids(new.steps[:count]) == ids(source.steps[:count])
    assert new.steps[count].prompt_ids.tolist() == source.steps[count].prompt_ids.tolist()
    assert ids(new.steps[count:]) != ids(source.steps[count:])
    assert [step.dropped for step in new.steps] == [DropReason.REPLAYED] * count + [None] * (CALLS - count)
    assert [step.reward for step in new.steps] == [1.0] * CALLS  # of its own environment

    batch = flatten([as_group(source, new)])
    own = batch.trajectory_of_step == 1
    assert own.sum() == CALLS - count
    packed = [call for call, mine in zip(calls(batch), own, strict=True) if mine]
    assert [call.token_ids.tolist() for call in packed] == [step.full_ids.tolist() for step in new.steps[count:]]
    assert {step.step for step in dropped_steps([as_group(new)])} == set(range(count))
    view = as_played(new)
    assert (view.oldest_version, view.newest_version, len(view.steps)) == (3, 3, CALLS)
    assert view.completion_tokens == sum(step.completion_tokens for step in new.steps[count:])
    assert as_trained(new).reward == float(CALLS)


def test_a_prefix_may_itself_have_one() -> None:
    first, _ = played(Echoing)
    second, _ = played(Echoing, prefix_of(first, 4))
    third, sampled = played(Echoing, Prefix.of("g000008.0", second.steps, 9))
    assert (third.start, sampled) == (Start("g000008.0", 9), CALLS - 9)
    assert ids(third.steps[:9]) == ids(second.steps[:9])
    assert ids(third.steps[:4]) == ids(first.steps[:4])


def test_the_own_calls_after_a_prefix_are_kept_and_replayed_as_own() -> None:
    source, _ = played(Echoing)
    expected, _ = played(Echoing, prefix := prefix_of(source, 5), log := Log())
    assert [call.number for call in log.calls] == list(range(5, CALLS))
    again, sampled = played(Echoing, prefix, replayed := Log(log.calls[:4]))
    assert (content(again), sampled, replayed.said) == (content(expected), CALLS - 9, [])
    assert [step.dropped for step in again.steps] == [step.dropped for step in expected.steps]
    other, sampled = played(Echoing, prefix_of(source, 6), forgotten := Log(log.calls[:4]))
    assert (sampled, forgotten.said, other.start) == (CALLS - 6, [], Start("g000007.2", 6))  # of another prefix


class Moody(Echoing):
    """What it says depends on its instance, from reply `at` on."""

    at = 3

    def answers(self, text: str) -> list[Message]:
        return [tool(f"{len(text)}" + ("!" * len(self.instances) if self.replies >= self.at else ""))]


class Late(Moody):
    at = 5


class Brief(Echoing):
    """Each instance takes fewer replies."""

    async def step(self, text: str) -> EnvStep:
        answer = await super().step(text)
        return answer._replace(done=answer.done or self.replies >= CALLS - 14 * (len(self.instances) - 1))


class Random(Environment):
    """Its first messages differ."""

    made = 0

    def reset(self, task: Task) -> Sequence[Message]:
        Random.made += 1
        return [user("hello" * Random.made)]

    async def step(self, text: str) -> EnvStep:
        return EnvStep([tool("on")], done=False)


@pytest.mark.parametrize("world", [Moody, Late, Brief, Random])
def test_other_observations_drop_the_start_by_name_and_nothing_is_mixed(world: Any) -> None:
    Echoing.instances.clear()
    source, _ = played(world)
    new, sampled = played(world, prefix_of(source, 5 if world is Late else 7))
    assert new.start is None
    what = "ended before the step to begin with" if world is Brief else "did not repeat its observations"
    assert f"environment 'p' {what}" in new.warning and "replayable = False" in new.warning
    assert all(step.dropped is None for step in new.steps) and sampled == len(new.steps)
    assert ids(new.steps)[0][1] != ids(source.steps)[0][1]
    assert all(made.closed for made in Echoing.instances)


@pytest.mark.parametrize("player", [Unreplayable])
def test_players_that_are_not_replayable_begin_at_the_beginning(player: Any) -> None:
    source, _ = played(player)
    new, sampled = played(player, prefix_of(source, 3))
    assert (new.start, new.warning, sampled) == (None, "", CALLS)


class Refusing(Echoing):
    """Rejects every third reply."""

    async def step(self, text: str) -> EnvStep:
        answer = await super().step(text)
        return answer._replace(reward=0.0, rejected=True) if self.replies % 3 == 1 else answer


def test_replies_that_were_rejected_are_replayed_and_rejected_again() -> None:
    source, _ = played(Refusing)
    new, sampled = played(Refusing, prefix_of(source, 6))
    assert sampled == CALLS - 6
    assert [step.dropped for step in new.steps[:6]] == [
        DropReason.REJECTED if number % 3 == 0 else DropReason.REPLAYED for number in range(6)
    ]


def test_an_agent_program_gets_the_recorded_answers_to_identical_requests() -> None:
    source, _ = played(chatting)
    new, sampled = played(chatting, prefix_of(source, 4))
    assert (new.start, sampled, new.warning) == (Start("g000007.2", 4), CALLS - 4, "")
    assert ids(new.steps[:4]) == ids(source.steps[:4])
    assert [step.dropped for step in new.steps] == [DropReason.REPLAYED] * 4 + [None] * (CALLS - 4)


def test_an_agent_program_that_asks_otherwise_begins_at_the_beginning() -> None:
    async def unlike(task: Task, client: AsyncOpenAI) -> float:
        times.append(1)
        await ask(client, [user("hello")])
        await ask(client, [user("again" * len(times))])
        await ask(client, [user("and again")])
        return 1.0

    times: list[int] = []
    source, _ = played(unlike)
    new, sampled = played(unlike, prefix_of(source, 2))
    assert (new.start, sampled, len(new.steps), len(times)) == (None, 3, 3, 3)
    assert "agent 'p' did not repeat its observations" in new.warning


def test_steps_that_no_replay_repeats_are_refused_by_name() -> None:
    step = make_step()
    other = ModelCall("user", (), user("hi"), 1, 1, 0.0, 0.0)
    none = np.empty(0, np.int32)
    unanswered = replace(
        step, completion_ids=none, policy_versions=none, logprobs=none.astype(np.float32), mask=none.astype(np.bool_)
    )
    for bad, why in (
        (replace(unanswered, dropped=DropReason.CANCELLED), "step 1 was cancelled"),
        (replace(step, calls=(other,)), "step 1 goes with other models' calls"),
    ):
        with pytest.raises(DataError, match=f"g1 cannot be replayed up to step 2: {why}"):
            Prefix.of("g1", [step, bad], 2)
        assert Prefix.of("g1", [step, bad], 1).start == Start("g1", 1)
    with pytest.raises(DataError, match="g1 has 2 steps; a prefix has 1 to that many, got 3"):
        Prefix.of("g1", [step, step], 3)


def test_a_failure_within_the_prefix_is_the_environments() -> None:
    class Falling(Echoing):
        async def step(self, text: str) -> EnvStep:
            if len(self.instances) > 1:
                raise ValueError("down")
            return await super().step(text)

    Echoing.instances.clear()
    source, _ = played(Falling)
    engine = FakeEngine(by_seed)
    whole = attempt(Falling, engine, prefix=prefix_of(source, 3), max_steps=CALLS, max_input_tokens=10_000)
    new = asyncio.run(whole)
    assert (new.status, new.start, len(engine.calls)) == (Status.FAILED, Start("g000007.2", 3), 0)


# Environments that go back


class Sandbox(Environment):
    """Counts its steps outside of itself, so that no replay may repeat them; `saved` outlives its instances."""

    replayable, restorable = False, True
    steps, saved = 0, dict[str, int]()

    async def reset(self, task: Task) -> Sequence[Message]:
        self.count, self.ends = 0, CALLS
        return [user("hello")]

    def step(self, text: str) -> EnvStep:
        Sandbox.steps, self.count = Sandbox.steps + 1, self.count + 1
        return EnvStep([tool(f"{self.count}")], 1.0, self.count == self.ends, state=str(self.count))

    async def snapshot(self) -> str:
        self.saved[name := f"s{len(self.saved)}"] = self.count
        return name

    async def restore(self, task: Task, snapshot: str) -> None:
        self.count, self.ends = self.saved[snapshot], CALLS


def kept(trajectory: Trajectory) -> Trajectory:
    """As it comes back from a shard."""
    return replace(trajectory, steps=tuple(step_of(step_row(step, name_of)) for step in trajectory.steps))


def in_sandbox(prefix: Prefix | None = None, begins: bool = True) -> tuple[Trajectory, int]:
    engine, Sandbox.steps = FakeEngine(by_seed if prefix is None else by_other_seed), 0
    settings: dict[str, Any] = {"max_input_tokens": 10_000, "starts": StartsConfig() if begins else None}
    trajectory = asyncio.run(attempt(Sandbox, engine, prefix=prefix, max_steps=CALLS, **settings))
    assert trajectory.failure is None, trajectory.failure
    return trajectory, len(engine.calls)


def test_an_environment_that_goes_back_is_restored_and_no_step_is_repeated() -> None:
    source, _ = in_sandbox()
    new, sampled = in_sandbox(prefix_of(kept(source), 8))
    assert (new.start, sampled, Sandbox.steps, new.warning) == (Start("g000007.2", 8), CALLS - 8, CALLS - 8, "")
    assert ids(new.steps[:8]) == ids(source.steps[:8])
    assert new.steps[8].prompt_ids.tolist() == source.steps[8].prompt_ids.tolist()
    assert [(step.reward, step.state_key) for step in new.steps] == [(s.reward, s.state_key) for s in source.steps]
    third, sampled = in_sandbox(prefix_of(kept(new), 12))  # of one that was restored itself
    assert (sampled, Sandbox.steps, ids(third.steps[:12])) == (CALLS - 12, CALLS - 12, ids(new.steps[:12]))


def test_a_snapshot_that_is_gone_drops_the_start_by_name() -> None:
    source, _ = in_sandbox()
    Sandbox.saved.clear()
    new, sampled = in_sandbox(prefix_of(source, 8))
    assert (new.start, sampled, Sandbox.steps) == (None, CALLS, CALLS)
    assert "environment 'p' could not be restored (restore raised KeyError" in new.warning


def test_without_starts_there_are_no_snapshots_and_without_snapshots_no_starts() -> None:
    Sandbox.saved.clear()
    source, _ = in_sandbox(begins=False)
    assert not Sandbox.saved and not any(step.answer for step in source.steps)
    new, sampled = in_sandbox(prefix_of(source, 8))
    assert (new.start, sampled, Sandbox.steps) == (None, CALLS, CALLS)
    assert "environment 'p' has no snapshot of the step to begin with" in new.warning
