"""Task order, admission, and what is sampled in place of what."""

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import make_step, plain_rollouts, saying, user
from treadle.core.errors import Cause, DataError, TrajectoryFailure
from treadle.core.types import DropReason, Failure, Group, Ids, Message, SamplingParams, Status, Task, Trajectory
from treadle.engines.fake import FakeEngine
from treadle.envs.base import Environment, EnvStep
from treadle.orchestration.buffer import GroupBuffer, Late
from treadle.orchestration.failures import FailurePolicy, FailuresConfig, Retries
from treadle.orchestration.producer import Producer, TaskCursor


def make_tasks(count: int) -> list[Task]:
    return [Task(f"t{i}", (user(str(i)),), "world") for i in range(count)]


# TaskCursor


@given(size=st.integers(1, 30), seed=st.integers(0, 2**48 - 1), shuffle=st.booleans(), epochs=st.integers(1, 4))
def test_every_epoch_plays_every_task_once(size: int, seed: int, shuffle: bool, epochs: int) -> None:
    cursor = TaskCursor(make_tasks(size), seed, shuffle)
    for epoch in range(epochs):
        met = [cursor.at(epoch * size + place) for place in range(size)]
        assert {e for e, _, _ in met} == {epoch}
        assert sorted(position for _, position, _ in met) == list(range(size))
        assert [task.task_id for _, _, task in met] == [f"t{position}" for _, position, _ in met]
        if not shuffle:
            assert [position for _, position, _ in met] == list(range(size))


def order(seed: int, epoch: int, size: int = 20) -> list[int]:
    cursor = TaskCursor(make_tasks(size), seed, shuffle=True)
    return [cursor.at(epoch * size + place)[1] for place in range(size)]


def test_each_epoch_and_seed_has_its_own_shuffle() -> None:
    orders = [order(seed, epoch) for seed in range(2) for epoch in range(3)]
    assert len({tuple(o) for o in orders}) == 6
    assert order(0, 1) == orders[1]


@given(st.integers(1, 12), st.lists(st.integers(0, 60), max_size=10))
def test_a_cursor_gives_the_same_task_whenever_it_is_asked(size: int, indices: list[int]) -> None:
    """A resumed run starts in the middle, and must neither skip nor repeat."""
    straight = TaskCursor(make_tasks(size), 5, shuffle=True)
    expected = {index: straight.at(index) for index in range(61)}
    jumping = TaskCursor(make_tasks(size), 5, shuffle=True)
    assert [jumping.at(index) for index in indices] == [expected[index] for index in indices]


@given(size=st.integers(2, 4), seed=st.integers(0, 2**48 - 1))
def test_no_shuffle_comes_twice_in_a_row(size: int, seed: int) -> None:
    """Of few tasks, chance would soon repeat one."""
    orders = [order(seed, epoch, size) for epoch in range(12)]
    assert all(before != after for before, after in itertools.pairwise(orders))
    straight = TaskCursor(make_tasks(size), seed, shuffle=True)
    assert [[straight.at(epoch * size + place)[1] for place in range(size)] for epoch in range(12)] == orders


def test_no_tasks_are_refused() -> None:
    with pytest.raises(DataError, match="no training tasks"):
        TaskCursor([], 0, True)


# Producer


class Slow(Environment):
    """The later a task was submitted, the sooner it is done."""

    async def step(self, text: str) -> EnvStep:
        await asyncio.sleep(0.02 / (1 + int(self.task.prompt[0]["content"])))
        return EnvStep(reward=1.0, done=True)


def make_buffer(
    judge: Callable[[Group], DropReason | None] = lambda group: None, staleness: int = 0, late: Late = "mask_steps"
) -> tuple[GroupBuffer, list[tuple[int, DropReason]]]:
    """A buffer, and what it discards."""
    discarded: list[tuple[int, DropReason]] = []
    buffer = GroupBuffer(
        max_staleness=staleness,
        late=late,
        judge=judge,
        discard=lambda group, reason: discarded.append((group.index, reason)),
    )
    return buffer, discarded


def producer(
    buffer: GroupBuffer, tasks: asyncio.TaskGroup, engine: FakeEngine | None = None, **settings: Any
) -> Producer:
    async def record(part: Group) -> None:
        await asyncio.sleep(0)

    options: dict[str, Any] = {
        "seed": 1,
        "group_size": 2,
        "capacity": 3,
        "in_rounds": True,
        "most": None,
        "most_attempts": lambda: math.inf,
        "next_index": 0,
        "again": (),
        "kept": {},
        "times_sampled": {},
        "retries": Retries(FailuresConfig()),
        "record": record,
        "left_out": lambda task: False,
        "on_trajectory": lambda trajectory, again: None,
        **settings,
    }
    world = options.pop("world", Slow)
    cursor = TaskCursor(make_tasks(40), 1, shuffle=False)
    return Producer(cursor, plain_rollouts(engine or saying("a"), world), buffer, tasks, **options)


async def next_batch(making: Producer, buffer: GroupBuffer, size: int, version: int = 0) -> list[Group]:
    """As the loop does."""
    while (batch := buffer.batch(size, version)) is None:
        making.admit(version)
        await asyncio.wait_for(buffer.arrival(), 5)
    return batch


def batches(
    versions: int,
    judge: Callable[[Group], DropReason | None] = lambda group: None,
    staleness: int = 0,
    **settings: Any,
) -> list[tuple[list[int], list[int]]]:
    """For each version, what is under way right after it is published, and what is trained: three groups."""

    async def go() -> list[tuple[list[int], list[int]]]:
        buffer, _ = make_buffer(judge, staleness)
        seen: list[tuple[list[int], list[int]]] = []
        engine = saying("a")
        async with asyncio.TaskGroup() as tasks:
            making = producer(buffer, tasks, engine, **settings)
            for version in range(versions):
                await engine.publish(version)
                making.admit(version)
                started = list(buffer.outstanding)
                batch = await next_batch(making, buffer, 3, version)
                seen.append((started, [g.index for g in batch]))
                buffer.trained()
            making.stop()
        return seen

    return asyncio.run(go())


def test_synchronous_admission_is_exactly_the_next_batch() -> None:
    expected = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batches(3) == [(indices, indices) for indices in expected]


def test_what_is_under_way_never_exceeds_the_capacity() -> None:
    """Two versions of staleness: three batches' worth, refilled as groups are trained."""
    seen = batches(4, staleness=2, capacity=9, in_rounds=False)
    assert [len(started) for started, _ in seen] == [9] * 4
    trained = [index for _, batch in seen for index in batch]
    assert len(set(trained)) == 12 and max(trained) < 18


def test_groups_run_side_by_side_only_as_far_as_allowed() -> None:
    seen = batches(2, staleness=2, capacity=9, in_rounds=False, most=2)
    assert len(seen[0][0]) == 2
    assert len({index for _, batch in seen for index in batch}) == 6


def test_groups_start_while_fewer_attempts_than_allowed_are_played() -> None:
    """Of two attempts each; one that ends makes room for another group, though its sibling goes on."""
    seen = batches(2, staleness=2, capacity=9, in_rounds=False, most_attempts=lambda: 5)
    assert len(seen[0][0]) == 3
    events: list[str] = []

    class Apart(Environment):
        async def reset(self, task: Task) -> list[Message]:
            events.append(f"{task.task_id} begins")
            self.slow, self.name = len(events) == 1, task.task_id
            return [user("go")]

        async def step(self, text: str) -> EnvStep:
            await asyncio.sleep(0.1 if self.slow else 0)
            events.append(f"{self.name} ends")
            return EnvStep(reward=1.0, done=True)

    batches(1, capacity=9, in_rounds=False, world=Apart, most_attempts=lambda: 2)
    assert events[:3] == ["t0 begins", "t0 begins", "t0 ends"]
    assert events.index("t1 begins") == 3


def test_a_resumed_producer_goes_on_where_the_run_stood() -> None:
    assert batches(2, next_index=6) == [([6, 7, 8], [6, 7, 8]), ([9, 10, 11], [9, 10, 11])]
    assert batches(2, next_index=6, again=(2, 4)) == [([2, 4, 6], [2, 4, 6]), ([7, 8, 9], [7, 8, 9])]


def test_others_take_the_place_of_what_is_discarded_in_order_and_exactly() -> None:
    """Every third group is of no use: a batch of three takes the first three others."""

    def judge(group: Group) -> DropReason | None:
        return DropReason.FILTERED if group.index % 3 == 0 else None

    assert [batch for _, batch in batches(3, judge=judge)] == [[1, 2, 4], [5, 7, 8], [10, 11, 13]]


def test_tasks_that_are_left_out_are_passed_over() -> None:
    taken = batches(2, left_out=lambda task: task.task_id in ("t1", "t4"))
    assert [batch for _, batch in taken] == [[0, 2, 3], [5, 6, 7]]


def test_only_the_attempts_that_a_kept_group_lacks_are_made() -> None:
    made = Trajectory("g000001.0", "t1", 0, (make_step(),), 1.0, Status.DONE)
    kept = {1: Group("g000001", 1, 0, 1, make_tasks(2)[1], (made,))}

    async def go() -> list[Group]:
        buffer, _ = make_buffer()
        async with asyncio.TaskGroup() as tasks:
            return await next_batch(producer(buffer, tasks, kept=kept, times_sampled={1: 1}), buffer, 3)

    batch = asyncio.run(go())
    assert [t.trajectory_id for t in batch[1].trajectories] == ["g000001.0", "g000001.1"]
    assert batch[1].trajectories[0] is made


@pytest.mark.parametrize(("retries", "attempts"), [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [0, 1, 2, 4])])
def test_a_failed_attempt_of_a_kept_group_is_made_again_if_it_would_have_been(
    retries: int, attempts: list[int]
) -> None:
    """Two attempts; the first failed, and so did the one in its place."""
    gone = Failure(Cause.INFRASTRUCTURE, "gone")
    made = tuple(Trajectory(f"g000001.{n}", "t1", n, (make_step(),), None, Status.FAILED, gone) for n in (0, 2))
    kept = {1: Group("g000001", 1, 0, 1, make_tasks(2)[1], made)}
    policy = FailuresConfig(infrastructure=FailurePolicy(retries=retries))

    async def go() -> Group:
        buffer, _ = make_buffer()
        async with asyncio.TaskGroup() as tasks:
            making = producer(buffer, tasks, kept=kept, retries=Retries(policy))
            return (await next_batch(making, buffer, 3))[1]

    assert [t.attempt for t in asyncio.run(go()).trajectories] == attempts


def test_what_is_on_record_is_gone_on_with_though_its_task_is_left_out_by_now() -> None:
    """Passed over, its steps would end as if they had been trained."""
    kept = {1: Group("g000001", 1, 0, 1, make_tasks(2)[1], ())}
    taken = batches(1, kept=kept, left_out=lambda task: task.task_id in ("t1", "t2"))
    assert [batch for _, batch in taken] == [[0, 1, 3]]


class Flaky(Environment):
    """Fails as often as told, over all attempts, then is right."""

    left = 0

    async def step(self, text: str) -> EnvStep:
        if type(self).left:
            type(self).left -= 1
            raise TrajectoryFailure(Cause.INFRASTRUCTURE, "gone")
        return EnvStep(reward=1.0, done=True)


@pytest.mark.parametrize(
    ("failures", "expected"), [(0, [1.0]), (1, [None, 1.0]), (2, [None, None, 1.0]), (3, [None, None, None])]
)
def test_a_failed_attempt_is_made_again_as_its_cause_allows(failures: int, expected: list[float | None]) -> None:
    class World(Flaky):
        left = failures

    policy = FailuresConfig(infrastructure=FailurePolicy(retries=2, backoff=0.001), retry_share=3.0)

    async def go() -> Group:
        buffer, _ = make_buffer()
        async with asyncio.TaskGroup() as tasks:
            making = producer(buffer, tasks, group_size=1, capacity=1, world=World, retries=Retries(policy))
            return (await next_batch(making, buffer, 1))[0]

    group = asyncio.run(go())
    assert [t.reward for t in group.trajectories] == expected
    assert [t.attempt for t in group.trajectories] == list(range(len(expected)))
    seeds = {s.sampling.seed for t in group.trajectories for s in t.steps}
    assert len(seeds) == len(expected)  # each has draws of its own


def test_retries_end_with_their_budget() -> None:
    retries = Retries(FailuresConfig(infrastructure=FailurePolicy(retries=1, backoff=2.0), retry_share=0.25))
    failed = Trajectory("t", "t", 0, (), None, Status.FAILED, Failure(Cause.INFRASTRUCTURE, "gone"))
    assert [retries.seconds_before(failed, 1) for _ in range(8)] == [2.0, None, None, None, 2.0, None, None, None]


def test_a_failure_may_be_graded() -> None:
    retries = Retries(FailuresConfig(agent=FailurePolicy(then="grade", reward=-1.0)))
    failed = Trajectory("t", "t", 0, (make_step(),), None, Status.FAILED, Failure(Cause.AGENT, "oops"))
    graded = retries.final(failed)
    assert (graded.reward, graded.status, graded.warning) == (-1.0, Status.DONE, "graded after a failure: agent: oops")
    other = replace(failed, failure=Failure(Cause.ENGINE, "gone"))
    assert retries.final(other) is other


def test_groups_leave_in_order_with_their_attempts_names_and_tasks() -> None:
    finished: list[str] = []
    arrival: list[int] = []

    def judge(group: Group) -> None:
        arrival.append(group.index)

    async def go() -> list[Group]:
        buffer, _ = make_buffer(judge)
        async with asyncio.TaskGroup() as tasks:
            making = producer(
                buffer, tasks, times_sampled={1: 2}, on_trajectory=lambda t, again: finished.append(t.trajectory_id)
            )
            return await next_batch(making, buffer, 3)

    batch = asyncio.run(go())
    assert arrival == [2, 1, 0]  # the worlds above see to that
    assert [g.group_id for g in batch] == ["g000000", "g000001r2", "g000002"]
    assert [g.task.task_id for g in batch] == ["t0", "t1", "t2"]
    assert [t.trajectory_id for t in batch[1].trajectories] == ["g000001r2.0", "g000001r2.1"]
    assert len(finished) == 6
    seeds = {s.sampling.seed for g in batch for t in g.trajectories for s in t.steps}
    assert len(seeds) == 6


def test_seeds_depend_on_the_address_not_on_how_often_a_group_was_sampled() -> None:
    def seeds(**settings: Any) -> list[int]:
        async def go() -> list[int]:
            buffer, _ = make_buffer()
            async with asyncio.TaskGroup() as tasks:
                batch = await next_batch(producer(buffer, tasks, **settings), buffer, 3)
            return [s.sampling.seed for g in batch for t in g.trajectories for s in t.steps]

        return asyncio.run(go())

    assert seeds() == seeds(times_sampled={0: 1, 2: 5})
    assert seeds() != seeds(seed=2)


def test_a_bug_ends_the_run_with_its_own_exception() -> None:
    """Not a failed trajectory, not a batch that never fills."""

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        raise ZeroDivisionError("a bug")

    async def go() -> None:
        buffer, _ = make_buffer()
        async with asyncio.TaskGroup() as tasks:
            await next_batch(producer(buffer, tasks, engine=FakeEngine(reply)), buffer, 3)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(go())
    assert caught.group_contains(ZeroDivisionError, match="a bug")
    assert not caught.group_contains(TimeoutError)


async def test_whatever_ends_a_group_ends_attempts_that_were_made_again_too() -> None:
    """One of two fails and is made again, for long; then what is told of the other one raises."""

    class World(Environment):
        made = 0

        async def step(self, text: str) -> EnvStep:
            type(self).made += 1
            if type(self).made == 1:
                raise TrajectoryFailure(Cause.INFRASTRUCTURE, "gone")
            await asyncio.sleep(0.01 if type(self).made == 2 else 10)
            return EnvStep(reward=1.0, done=True)

    def told(trajectory: Trajectory, again: bool) -> None:
        if trajectory.reward is not None:
            raise ZeroDivisionError("a bug")

    engine, policy = saying("a"), FailuresConfig(infrastructure=FailurePolicy(retries=1, backoff=0))
    buffer, _ = make_buffer()
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            making = producer(
                buffer, tasks, engine, world=World, capacity=1, on_trajectory=told, retries=Retries(policy)
            )
            making.admit(0)
    assert World.made == 3 and not engine.open
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("ticks", range(4))
async def test_attempts_end_with_their_producer_even_if_nobody_waits_for_them_yet(ticks: int) -> None:
    engine = saying("a")
    buffer, _ = make_buffer()
    async with asyncio.TaskGroup() as tasks:
        making = producer(buffer, tasks, engine)
        making.admit(0)
        for _ in range(ticks):
            await asyncio.sleep(0)
        assert engine.open
        making.stop()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not engine.open
