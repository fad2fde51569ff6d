"""Task order, admission, and batches in submission order whatever finishes first."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import make_group, plain_rollouts, saying, user
from treadle.core.errors import DataError
from treadle.core.types import Group, Ids, SamplingParams, Task
from treadle.engines.fake import FakeEngine
from treadle.envs.base import Environment, EnvStep
from treadle.orchestration.producer import GroupBuffer, Producer, TaskCursor


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


def test_no_tasks_are_refused() -> None:
    with pytest.raises(DataError, match="no training tasks"):
        TaskCursor([], 0, True)


# GroupBuffer


@given(st.permutations(range(9)), st.integers(1, 3), st.integers(0, 5))
def test_batches_are_in_submission_order_and_durable_first(arrival: Sequence[int], size: int, first: int) -> None:
    persisted: list[list[int]] = []

    async def take_all() -> list[list[int]]:
        buffer = GroupBuffer(first, lambda groups: persisted.append([g.index for g in groups]))
        taken: list[list[int]] = []

        async def trainer() -> None:
            for number in range(9 // size):
                batch = await buffer.take(size)
                assert len(persisted) == number + 1
                taken.append([g.index for g in batch])

        training = asyncio.ensure_future(trainer())
        for index in arrival:
            buffer.put(make_group(first + index))
            await asyncio.sleep(0)
        await asyncio.wait_for(training, 5)
        return taken

    expected = [list(range(first + at, first + at + size)) for at in range(0, 9 - size + 1, size)]
    assert asyncio.run(take_all()) == expected
    assert persisted == expected


def test_a_batch_waits_for_its_slowest_group() -> None:
    async def go() -> None:
        buffer = GroupBuffer(0, lambda groups: None)
        taking = asyncio.ensure_future(buffer.take(2))
        buffer.put(make_group(1))
        buffer.put(make_group(2))
        await asyncio.sleep(0.01)
        assert not taking.done()
        buffer.put(make_group(0))
        assert [g.index for g in await asyncio.wait_for(taking, 5)] == [0, 1]

    asyncio.run(go())


# Producer


class Slow(Environment):
    """The later a task was submitted, the sooner it is done."""

    async def step(self, text: str) -> EnvStep:
        await asyncio.sleep(0.02 / (1 + int(self.task.prompt[0]["content"])))
        return EnvStep(reward=1.0, done=True)


def producer(
    buffer: GroupBuffer, tasks: asyncio.TaskGroup, engine: FakeEngine | None = None, **settings: Any
) -> Producer:
    options: dict[str, Any] = {
        "seed": 1,
        "group_size": 2,
        "groups_per_batch": 3,
        "max_staleness": 0,
        "started": 0,
        "times_sampled": {},
        "on_trajectory": lambda: None,
        **settings,
    }
    cursor = TaskCursor(make_tasks(40), 1, shuffle=False)
    return Producer(cursor, plain_rollouts(engine or saying("a"), Slow), buffer, tasks, **options)


class Counting(GroupBuffer):
    """Keeps everything that was put into it."""

    def __init__(self) -> None:
        super().__init__(0, lambda groups: None)
        self.groups: list[Group] = []

    def put(self, group: Group) -> None:
        self.groups.append(group)
        super().put(group)


def started(versions: Sequence[int], **settings: Any) -> list[list[int]]:
    """Indices of the groups started by each call of `admit`."""

    async def go() -> list[list[int]]:
        buffer = Counting()
        counts: list[list[int]] = []
        for version in versions:
            async with asyncio.TaskGroup() as tasks:
                if not counts:
                    admitting = producer(buffer, tasks, **settings)
                admitting._tasks = tasks
                before = len(buffer.groups)
                admitting.admit(version)
            counts.append(sorted(g.index for g in buffer.groups[before:]))
        return counts

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [
        (0, [[0, 1, 2], [], [3, 4, 5], [6, 7, 8]]),
        (1, [[0, 1, 2, 3, 4, 5], [], [6, 7, 8], [9, 10, 11]]),
        (3, [list(range(12)), [], [12, 13, 14], [15, 16, 17]]),
    ],
)
def test_admission_follows_the_policy_version(staleness: int, expected: list[list[int]]) -> None:
    """started < (version + 1 + max_staleness) * groups_per_batch."""
    assert started([0, 0, 1, 2], max_staleness=staleness) == expected


def test_a_resumed_producer_goes_on_where_the_run_stood() -> None:
    assert started([2, 3], started=6) == [[6, 7, 8], [9, 10, 11]]


def test_groups_leave_in_order_with_their_attempts_names_and_tasks() -> None:
    finished: list[int] = []

    async def go() -> tuple[list[Group], list[int]]:
        buffer = Counting()
        async with asyncio.TaskGroup() as tasks:
            making = producer(buffer, tasks, times_sampled={1: 2}, on_trajectory=lambda: finished.append(1))
            making.admit(0)
            batch = await buffer.take(3)
        return batch, [g.index for g in buffer.groups]

    batch, arrival = asyncio.run(go())
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
            buffer = Counting()
            async with asyncio.TaskGroup() as tasks:
                producer(buffer, tasks, **settings).admit(0)
                batch = await buffer.take(3)
            return [s.sampling.seed for g in batch for t in g.trajectories for s in t.steps]

        return asyncio.run(go())

    assert seeds() == seeds(times_sampled={0: 1, 2: 5})
    assert seeds() != seeds(seed=2)


def test_a_bug_ends_the_run_with_its_own_exception() -> None:
    """Not a failed trajectory, not a batch that never fills."""

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        raise ZeroDivisionError("a bug")

    async def go() -> None:
        buffer = Counting()
        async with asyncio.TaskGroup() as tasks:
            producer(buffer, tasks, engine=FakeEngine(reply)).admit(0)
            await asyncio.wait_for(buffer.take(3), 5)

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(go())
    assert caught.group_contains(ZeroDivisionError, match="a bug")
    assert not caught.group_contains(TimeoutError)
