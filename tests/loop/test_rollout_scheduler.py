"""Task order, admission, and what is sampled in place of what."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clocks import virtually
from tests.loop.groups import Judge, Judged, Unrecorded, make_queue, make_tasks
from tests.until import until
from tests.worlds import hang, make_step, plain_rollouts, saying, tiny, user
from treadle.core.engine import Completion
from treadle.core.errors import Cause, TrajectoryFailure
from treadle.core.types import DropReason, Failure, Group, Ids, Message, SamplingParams, Status, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.loop.failures import FailurePolicy, FailuresConfig
from treadle.loop.groups import Groups
from treadle.loop.rollout_scheduler import ConcurrencyController, RolloutScheduler
from treadle.loop.task_queue import Backlog, TaskOrder
from treadle.record.ledger_reader import LoopState
from treadle.rollout.rewards import RewardShaper
from treadle.testing import FakeEngine

# TaskOrder


@given(size=st.integers(1, 30), seed=st.integers(0, 2**48 - 1), shuffle=st.booleans(), epochs=st.integers(1, 4))
def test_every_epoch_plays_every_task_once(size: int, seed: int, shuffle: bool, epochs: int) -> None:
    cursor = TaskOrder(make_tasks(size), seed, shuffle)
    for epoch in range(epochs):
        met = [cursor.at(epoch * size + place) for place in range(size)]
        assert {e for e, _, _ in met} == {epoch}
        assert sorted(position for _, position, _ in met) == list(range(size))
        assert [task.task_id for _, _, task in met] == [f"t{position}" for _, position, _ in met]
        if not shuffle:
            assert [position for _, position, _ in met] == list(range(size))


def order(seed: int, epoch: int, size: int = 20) -> list[int]:
    cursor = TaskOrder(make_tasks(size), seed, shuffle=True)
    return [cursor.at(epoch * size + place)[1] for place in range(size)]


@given(st.integers(1, 12), st.lists(st.integers(0, 60), max_size=10))
def test_a_cursor_gives_the_same_task_whenever_it_is_asked(size: int, indices: list[int]) -> None:
    """A resumed run starts in the middle, and must neither skip nor repeat."""
    straight = TaskOrder(make_tasks(size), 5, shuffle=True)
    expected = {index: straight.at(index) for index in range(61)}
    jumping = TaskOrder(make_tasks(size), 5, shuffle=True)
    assert [jumping.at(index) for index in indices] == [expected[index] for index in indices]


@given(size=st.integers(2, 4), seed=st.integers(0, 2**48 - 1))
def test_no_shuffle_comes_twice_in_a_row(size: int, seed: int) -> None:
    """Of few tasks, chance would soon repeat one."""
    orders = [order(seed, epoch, size) for epoch in range(12)]
    assert all(before != after for before, after in itertools.pairwise(orders))
    straight = TaskOrder(make_tasks(size), seed, shuffle=True)
    assert [[straight.at(epoch * size + place)[1] for place in range(size)] for epoch in range(12)] == orders


# RolloutScheduler


class Slow(Environment):
    """The later a task was submitted, the sooner it is done."""

    async def step(self, text: str) -> EnvStep:
        await asyncio.sleep(0.02 / (1 + int(self.task.prompt[0]["content"])))
        return EnvStep(reward=1.0, done=True)


class Full(ConcurrencyController):
    """So many attempts fill the engine, whatever they do."""

    limit = 0

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def observe(self, trajectory: Trajectory) -> None:
        """Nothing is learned."""


@dataclass
class Sampling:
    """A scheduler of 40 tasks, and what it works with."""

    scheduler: RolloutScheduler
    groups: Groups
    store: Unrecorded
    engine: FakeEngine

    async def next_batch(self, version: int = 0) -> list[Group]:
        return (await self.scheduler.next_batch(LoopState(version=version))).groups


def sampling(
    judge: Judge = lambda group: None,
    *,
    seed: int = 1,
    group_size: int = 2,
    size: int = 3,
    max_groups: int | None = None,
    attempts: int = 2**31,
    staleness: int = 0,
    backlog: Backlog | None = None,
    left_out: Sequence[str] = (),
    causes: str = "{}",
    world: type[Environment] = Slow,
    engine: FakeEngine | None = None,
) -> Sampling:
    config = tiny(
        f"seed={seed}",
        f"training.group_size={group_size}",
        f"training.tasks_per_update={size}",
        f"orchestration.max_staleness={staleness}",
        f"orchestration.max_concurrent_groups={max_groups or 'null'}",
        *(["training.min_group_size=1"] if group_size == 1 else []),
        "failures.max_failed_fraction=1",
        f"failures.causes={causes}",
    )
    engine, queue, store = engine or saying("a"), make_queue(backlog, left_out), Unrecorded()
    groups = Judged(config, queue, store, judge)
    runner = plain_rollouts(engine, world)
    scheduler = RolloutScheduler(config.loop, queue, runner, groups, Full(attempts), RewardShaper(config.rewards, 60.0))
    return Sampling(scheduler, groups, store, engine)


def one_batch(**settings: Any) -> list[Group]:
    async def go() -> list[Group]:
        made = sampling(**settings)
        async with made.scheduler.sampling():
            return await made.next_batch()

    return virtually(go())


def batches(versions: int, judge: Judge = lambda group: None, **settings: Any) -> list[tuple[list[int], list[int]]]:
    """For each version, what is under way right after it is published, and what is trained: three groups."""

    async def go() -> list[tuple[list[int], list[int]]]:
        made = sampling(judge, **settings)
        seen: list[tuple[list[int], list[int]]] = []
        async with made.scheduler.sampling():
            for version in range(versions):
                await made.engine.publish(version)
                made.scheduler.start_groups(version)
                started = list(made.groups.outstanding)
                seen.append((started, [group.index for group in await made.next_batch(version)]))
                made.groups.trained()
        return seen

    return virtually(go())


def test_synchronous_admission_is_exactly_the_next_batch() -> None:
    expected = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batches(3) == [(indices, indices) for indices in expected]


def test_what_is_under_way_never_exceeds_the_capacity() -> None:
    """Two versions of staleness: three batches' worth, refilled as groups are trained."""
    seen = batches(4, staleness=2)
    assert [len(started) for started, _ in seen] == [9] * 4
    trained = [index for _, batch in seen for index in batch]
    assert len(set(trained)) == 12 and max(trained) < 18


def test_groups_start_while_fewer_attempts_than_allowed_are_played() -> None:
    """Of two attempts each; one that ends makes room for another group, though its sibling goes on."""
    seen = batches(2, staleness=2, attempts=5)
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

    batches(1, staleness=2, world=Apart, attempts=2)
    assert events[:3] == ["t0 begins", "t0 begins", "t0 ends"]
    assert events.index("t1 begins") == 3


def test_a_resumed_scheduler_goes_on_where_the_run_stood() -> None:
    assert batches(2, backlog=Backlog(6)) == [([6, 7, 8], [6, 7, 8]), ([9, 10, 11], [9, 10, 11])]
    requeued = batches(2, backlog=Backlog(6, requeued=(2, 4)))
    assert requeued == [([2, 4, 6], [2, 4, 6]), ([7, 8, 9], [7, 8, 9])]


def test_others_take_the_place_of_what_is_discarded_in_order_and_exactly() -> None:
    """Every third group is of no use: a batch of three takes the first three others."""

    def judge(group: Group) -> DropReason | None:
        return DropReason.FILTERED if group.index % 3 == 0 else None

    assert [batch for _, batch in batches(3, judge=judge)] == [[1, 2, 4], [5, 7, 8], [10, 11, 13]]


def test_only_the_attempts_that_a_restored_group_lacks_are_made() -> None:
    made = Trajectory("g000001.0", "t1", 0, (make_step(),), 1.0, Status.DONE)
    restored = {1: Group("g000001", 1, 0, 1, make_tasks(2)[1], (made,))}
    batch = one_batch(backlog=Backlog(restored=restored, times_sampled={1: 1}))
    assert [t.trajectory_id for t in batch[1].trajectories] == ["g000001.0", "g000001.1"]
    assert batch[1].trajectories[0] is made


@pytest.mark.parametrize(("retries", "attempts"), [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [0, 1, 2, 4])])
def test_a_failed_attempt_of_a_restored_group_is_retried_if_it_would_have_been(
    retries: int, attempts: list[int]
) -> None:
    """Two attempts; the first failed, and so did the one in its place."""
    gone = Failure(Cause.INFRASTRUCTURE, "gone")
    made = tuple(Trajectory(f"g000001.{n}", "t1", n, (make_step(),), None, Status.FAILED, gone) for n in (0, 2))
    restored = {1: Group("g000001", 1, 0, 1, make_tasks(2)[1], made)}
    causes = f"{{infrastructure: {{retries: {retries}}}}}"
    group = one_batch(backlog=Backlog(restored=restored), causes=causes)[1]
    assert [t.attempt for t in group.trajectories] == attempts


def test_what_is_on_record_is_gone_on_with_though_its_task_is_left_out_by_now() -> None:
    """Passed over, its steps would end as if they had been trained."""
    restored = {1: Group("g000001", 1, 0, 1, make_tasks(2)[1], ())}
    taken = batches(1, backlog=Backlog(restored=restored), left_out=("t1", "t2"))
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
def test_a_failed_attempt_is_retried_as_its_cause_allows(failures: int, expected: list[float | None]) -> None:
    class World(Flaky):
        left = failures

    [group] = one_batch(size=1, group_size=1, world=World, causes="{infrastructure: {retries: 2, backoff: 0.001}}")
    assert [t.reward for t in group.trajectories] == expected
    assert [t.attempt for t in group.trajectories] == list(range(len(expected)))
    seeds = {s.sampling.seed for t in group.trajectories for s in t.steps}
    assert len(seeds) == len(expected)  # each has draws of its own


@pytest.mark.parametrize(("staleness", "retried"), [(0, [("t0", 8.0), ("t1", 8.0)]), (1, [("t0", 2.0), ("t1", 5.0)])])
def test_a_synchronous_batch_retries_together_and_other_groups_by_themselves(
    staleness: int, retried: list[tuple[str, float]]
) -> None:
    """The first two groups fail after 1 and 2 seconds, to be retried 1 and 3 later; the third one takes 5."""
    begun: list[tuple[str, float]] = []
    lasts = {"t0": 1.0, "t1": 2.0, "t2": 5.0}
    causes = {"t0": Cause.INFRASTRUCTURE, "t1": Cause.VERIFIER}

    class Apart(Environment):
        async def reset(self, task: Task) -> list[Message]:
            self.first, self.name = all(name != task.task_id for name, _ in begun), task.task_id
            begun.append((self.name, asyncio.get_running_loop().time()))
            return [user("go")]

        async def step(self, text: str) -> EnvStep:
            await asyncio.sleep(lasts.get(self.name, 100.0))
            if self.first and self.name in causes:
                raise TrajectoryFailure(causes[self.name], "gone")
            return EnvStep(reward=1.0, done=True)

    policies = "{infrastructure: {retries: 1, backoff: 1}, verifier: {retries: 1, backoff: 3}}"
    batch = one_batch(group_size=1, world=Apart, causes=policies, staleness=staleness, max_groups=3)
    assert [group.index for group in batch] == [0, 1, 2]
    assert [one for n, one in enumerate(begun) if one[0] in [name for name, _ in begun[:n]]] == retried


def test_retries_wait_longer_each_time_and_end() -> None:
    failures = FailuresConfig(causes={Cause.INFRASTRUCTURE: FailurePolicy(backoff=3.0)})
    failed = Trajectory("t", "t", 0, (), None, Status.FAILED, Failure(Cause.INFRASTRUCTURE, "gone"))
    assert [failures.retry_delay(failed, number) for number in (1, 2, 3)] == [3.0, 6.0, None]


def test_a_failure_may_be_graded() -> None:
    failures = FailuresConfig(causes={Cause.AGENT: FailurePolicy(grade=-1.0)})
    failed = Trajectory("t", "t", 0, (make_step(),), None, Status.FAILED, Failure(Cause.AGENT, "oops"))
    graded = failures.final(failed)
    assert (graded.reward, graded.status, graded.warning) == (
        -1.0,
        Status.GRADED,
        "graded after a failure: agent: oops",
    )
    other = replace(failed, failure=Failure(Cause.ENGINE, "gone"))
    assert failures.final(other) is other


def test_seeds_depend_on_the_address_not_on_how_often_a_group_was_sampled() -> None:
    def seeds(**settings: Any) -> list[int]:
        return [s.sampling.seed for g in one_batch(**settings) for t in g.trajectories for s in t.steps]

    assert seeds() == seeds(backlog=Backlog(times_sampled={0: 1, 2: 5}))
    assert seeds() != seeds(seed=2)


def test_a_bug_ends_the_run_with_its_own_exception() -> None:
    """Not a failed trajectory, not a batch that never fills."""

    def reply(prompt: Ids, sampling: SamplingParams) -> list[int]:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        one_batch(engine=FakeEngine(reply), size=1)


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_attempt_whose_engine_cancels_a_call_fails_alone(staleness: int) -> None:
    class Cancelling(FakeEngine):
        asked = 0

        async def generate(self, *arguments: Any, **options: Any) -> Completion:
            self.asked += 1
            if self.asked == 2:
                raise asyncio.CancelledError
            return await super().generate(*arguments, **options)

    class Even(Environment):
        async def step(self, text: str) -> EnvStep:
            return EnvStep(reward=1.0, done=True)

    engine = Cancelling(saying("a").reply)
    batch = one_batch(engine=engine, world=Even, causes="{engine: {retries: 0}}", staleness=staleness)
    failures = [t.failure for group in batch for t in group.trajectories if t.failure]
    assert [failure.cause for failure in failures] == [Cause.ENGINE]
    assert sum(t.reward == 1.0 for group in batch for t in group.trajectories) == 5


async def test_whatever_ends_a_group_ends_attempts_that_were_retried_too() -> None:
    """One of two fails and is retried, for long; then recording the other one raises."""

    class World(Environment):
        made = 0

        async def step(self, text: str) -> EnvStep:
            type(self).made += 1
            if type(self).made == 1:
                raise TrajectoryFailure(Cause.INFRASTRUCTURE, "gone")
            await (until(lambda: type(self).made == 3) if type(self).made == 2 else hang())
            return EnvStep(reward=1.0, done=True)

    class Failing(Unrecorded):
        async def record(self, part: Group, version: int) -> None:
            if part.trajectories[0].reward is not None:
                raise ZeroDivisionError("a bug")

    causes = "{infrastructure: {retries: 1, backoff: 0}}"
    made = sampling(world=World, size=1, max_groups=1, causes=causes, staleness=1)
    made.groups.store = Failing()
    with pytest.raises(ZeroDivisionError):
        async with made.scheduler.sampling():
            made.scheduler.start_groups(0)
            await asyncio.sleep(20)
    assert World.made == 3 and not made.engine.open
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("ticks", range(4))
async def test_attempts_end_with_their_scheduler_even_if_nobody_waits_for_them_yet(ticks: int) -> None:
    made = sampling()
    async with made.scheduler.sampling():
        made.scheduler.start_groups(0)
        for _ in range(ticks):
            await asyncio.sleep(0)
        assert made.engine.open
    for _ in range(5):
        await asyncio.sleep(0)
    assert not made.engine.open


def test_a_group_that_is_sampled_again_comes_first_and_has_a_name_of_its_own() -> None:
    backlog = Backlog(next_index=2, requeued=(1,), times_sampled={1: 1, 2: 2})
    queue = make_queue(backlog)
    groups = [queue.pop() for _ in range(3)]
    assert [(group.group_id, group.position) for group in groups if group is not None] == [
        ("g000001r1", 1),
        ("g000002r2", 2),
        ("g000003", 3),
    ]


def trajectory(seconds: float, *calls: float) -> Trajectory:
    steps = tuple(replace(make_step(), seconds=call) for call in calls)
    return Trajectory("t", "task", 0, steps, 1.0, Status.DONE, seconds=seconds)


@given(share=st.floats(0.01, 4), lengths=st.lists(st.floats(0.1, 1e4), min_size=1, max_size=40))
def test_attempts_that_are_partly_elsewhere_leave_room_for_others(share: float, lengths: list[float]) -> None:
    """A share above 1: calls side by side."""
    limit = ConcurrencyController(64)
    for seconds in lengths:
        limit.observe(trajectory(seconds, share * seconds / 2, share * seconds / 2))
    assert limit.engine_share == pytest.approx(share)
    assert limit.limit == pytest.approx(64 / share, rel=1e-6, abs=1.001)


def test_groups_that_are_scarce_are_so_in_evaluations_too() -> None:
    assert tiny().loop.evaluated_together == 256
    assert tiny("orchestration.max_concurrent_groups=2").loop.evaluated_together == 2 * tiny().training.group_size


@pytest.mark.quick(2)
@pytest.mark.parametrize(("engine", "environment"), [(1.0, 0.0), (1.0, 3.0), (2.0, 1.0), (0.5, 20.0)])
def test_the_engine_is_kept_full_and_its_queue_short(engine: float, environment: float) -> None:
    """Attempts of four calls each, started as the limit allows, after a change from another world."""
    capacity, limit = 8, ConcurrencyController(8)
    for _ in range(200):
        limit.observe(trajectory(10.0, 9.0))

    async def go() -> tuple[float, float]:
        clock, places = asyncio.get_running_loop(), asyncio.Semaphore(capacity)
        busy = waited = 0.0

        async def attempt(number: int) -> None:
            nonlocal busy, waited
            await asyncio.sleep(number % 7 / 7 * environment)
            started, calls = clock.time(), []
            for _ in range(4):
                asked = clock.time()
                async with places:
                    waited += clock.time() - asked
                    await asyncio.sleep(engine)
                busy += engine
                calls.append(clock.time() - asked)
                await asyncio.sleep(environment)
            limit.observe(trajectory(clock.time() - started, *calls))

        running: set[asyncio.Task[None]] = set()
        for number in range(1500):
            while len(running) >= limit.limit:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running.add(asyncio.create_task(attempt(number)))
            if number == 500:
                begun, busy, waited = clock.time(), 0.0, 0.0
        elapsed = clock.time() - begun
        await asyncio.wait(running)
        return busy / capacity / elapsed, waited / busy

    used, waiting = virtually(go())
    assert used > 0.9
    assert waiting < 0.5
