"""The loop in virtual time, with an engine and a learner that only take theirs: nothing is lost, late or stuck."""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clocks import virtually
from tests.worlds import tiny, vowel_tasks
from treadle.core.draws import Stream
from treadle.core.files import WrittenFile
from treadle.core.outcomes import as_trained
from treadle.core.stop import StopRequest
from treadle.core.types import Group, Task
from treadle.loop.loop import Loop, StartingPoint
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import LoopState
from treadle.record.run_directory import RunDirectory
from treadle.record.run_store import RunStore
from treadle.report.callbacks import Callbacks
from treadle.rollout.rewards import RewardsConfig, RewardShaper
from treadle.rollout.session import Address
from treadle.testing import FakeAttempt, FakeEngine, FakeRunner, FakeTrainer, VirtualLoop


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_day_takes_no_time_and_limits_are_kept() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 86_400 * 3)
        assert now() == pytest.approx(86_400 * 3)

    started = time.perf_counter()
    virtually(main())
    assert time.perf_counter() - started < 5


def test_time_stands_still_while_a_thread_computes() -> None:
    async def main() -> float:
        asyncio.get_running_loop().call_later(1000, ticks.append, 1)
        await asyncio.to_thread(time.sleep, 0.05)
        assert not ticks
        return now()

    ticks: list[int] = []
    assert virtually(main()) == 0


def test_waiting_for_nothing_is_an_error_instead_of_a_hang() -> None:
    async def main() -> None:
        await asyncio.sleep(2)
        await asyncio.Event().wait()

    loop = VirtualLoop()
    waiting = loop.create_task(main())
    with pytest.raises(RuntimeError, match="at 2 virtual seconds every coroutine waits"):
        loop.run_until_complete(waiting)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(waiting)
    loop.close()


UPDATES = 8


@dataclass
class World:
    """How long things take, in virtual seconds, and how often they fail; what was seen of them.

    spread: of the lognormal length of a step, whose median is 1. begun: when each training attempt began.
    """

    spread: float = 0.0
    failing: float = 0.0
    update: float = 1.0
    held_out: float = 0.0
    writing: float = 0.0
    begun: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    evaluating: list[float] = field(default_factory=list)
    playing: int = 0

    def attempt(self, name: str, task: Task, address: Address) -> FakeAttempt:
        """What the runner plays."""
        now = asyncio.get_running_loop().time()
        if address.stream is not Stream.TRAIN:
            self.evaluating.append(now)
            return FakeAttempt([self.held_out])
        self.begun.append(now)
        draws = random.Random(name)
        seconds = [draws.lognormvariate(0, self.spread) for _ in range(draws.randint(1, 3))]
        failed = draws.random() < self.failing
        return FakeAttempt(seconds, None if failed else float(draws.random() < 0.7))


class Training:
    """Notes what is trained, of which version, and how stale it is."""

    def __init__(self, world: World) -> None:
        self.world, self.version = world, 0

    def __call__(self, groups: Sequence[Group]) -> None:
        graded = [t for group in groups for t in group.trajectories if t.reward is not None]
        steps = [step for t in graded for step in as_trained(t).steps]
        self.world.staleness += [self.version - int(step.policy_versions.min()) for step in steps]
        self.world.trained += [group.group_id for group in groups]
        self.version += 1


class Unwritten(RunStore):
    """Puts attempts on record without their tokens."""

    def __init__(self, run: RunDirectory, ledger: Ledger, seconds: float) -> None:
        super().__init__(run, ledger)
        self._seconds = seconds

    async def _record_all(self, parts: list[Group]) -> None:
        await asyncio.sleep(self._seconds)
        self.ledger.record(parts, "train", self._version, WrittenFile("shard", ""))


def train(
    world: World, *overrides: str, held_out: Sequence[Task] = (), start: LoopState | None = None
) -> tuple[LoopState, list[dict[str, Any]]]:
    """Run the loop to its end; the last state, and every step with its group. Raises what the loop raises."""
    begun = start or LoopState()
    plan = tiny(f"orchestration.updates={UPDATES}", "training.min_group_size=1", *overrides).loop
    steps: list[dict[str, Any]] = []

    async def go() -> LoopState:
        engine, ledger = FakeEngine(lambda prompt, sampling: ()), Ledger(Path(":memory:"))
        runner = FakeRunner(engine, world.attempt)
        with tempfile.TemporaryDirectory() as directory:
            run = RunDirectory(Path(directory))
            run.checkpoints.mkdir()
            run.rollouts.mkdir()
            loop = Loop(
                replace(plan, train=vowel_tasks("train", 7), held_out=held_out),
                FakeTrainer(world.update, Training(world)),
                engine,
                runner,
                RewardShaper(RewardsConfig(), 60.0),
                Unwritten(run, ledger, world.writing),
                Callbacks({}, StopRequest()),
                StartingPoint(begun),
            )
            state = await asyncio.wait_for(loop.run(), 1e6)
            world.playing = runner.playing
        steps.extend(
            ledger.query(
                "SELECT s.state, s.reason, t.reward, g.* FROM steps s JOIN trajectories t USING (trajectory_id) "
                "JOIN groups g USING (group_id) WHERE split = 'train'"
            )
        )
        ledger.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return state

    return virtually(go()), steps


def test_groups_go_on_beside_an_evaluation_though_all_were_ready() -> None:
    """Sampling takes 3 seconds at most, an update 50 and an evaluation 100."""
    world = World(update=50, held_out=100)
    train(world, "orchestration.max_staleness=1", "evaluation.every=1", held_out=vowel_tasks("held-out", 2))
    evaluations = sorted(set(world.evaluating))[1:-1]
    assert len(evaluations) == UPDATES - 1
    for began in evaluations:
        assert any(began <= at < began + 100 for at in world.begun)


@pytest.mark.parametrize("staleness", [0, 2])
def test_nothing_is_written_any_more_when_the_run_has_ended(staleness: int) -> None:
    """Attempts that are being put on record when their groups are cancelled are there before the last checkpoint."""
    world = World(update=5, writing=50)
    _, steps = train(world, f"orchestration.max_staleness={staleness}")
    assert steps and all(step["state"] in ("trained", "dropped") for step in steps)


@settings(max_examples=20)
@given(
    spread=st.sampled_from([0.2, 1.0, 2.0]),
    failing=st.sampled_from([0.0, 0.3, 0.6]),
    update=st.sampled_from([0.1, 1.0, 5.0]),
    staleness=st.integers(1, 4),
    policy=st.sampled_from(["wait", "wait", "mask_steps", "drop_group"]),
    groups=st.integers(1, 4),
    size=st.integers(2, 4),
    most=st.sampled_from(["null", "1", "2", "5"]),
    batch=st.sampled_from([1, 2, 8, 64]),
    retries=st.sampled_from([0, 2]),
    backoff=st.sampled_from([0.1, 20.0]),
    sampling=st.sampled_from(["off", "filter", "replace"]),
    every=st.sampled_from([0, 1, 3]),
    writing=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**20),
)
def test_whatever_the_settings_every_step_ends_once_in_time_and_nothing_waits_for_ever(
    spread: float,
    failing: float,
    update: float,
    staleness: int,
    policy: str,
    groups: int,
    size: int,
    most: str,
    batch: int,
    retries: int,
    backoff: float,
    sampling: str,
    every: int,
    writing: float,
    seed: int,
) -> None:
    world = World(spread=spread, failing=failing, update=update, held_out=3.0, writing=writing)
    state, steps = train(
        world,
        f"seed={seed}",
        f"orchestration.max_staleness={staleness}",
        f"orchestration.stale_policy={policy}",
        f"orchestration.max_concurrent_groups={most}",
        "failures.max_sampled=1000",
        "failures.max_failed_fraction=1",
        f"training.tasks_per_update={groups}",
        f"training.group_size={size}",
        f"engine.batch={batch}",
        f"algorithm.dynamic_sampling={sampling}",
        f"failures.causes.engine.retries={retries}",
        f"failures.causes.engine.backoff={backoff}",
        "failures.task_limit=1000",
        f"evaluation.every={every}",
        held_out=vowel_tasks("held-out", 1),
    )
    assert state.update == UPDATES
    assert len(world.trained) == len(set(world.trained)) == UPDATES * groups
    assert min(world.staleness, default=0) >= 0 and max(world.staleness, default=0) <= staleness
    assert world.playing == 0
    for step in steps:
        assert step["state"] in ("trained", "dropped")
        if step["state"] == "trained":
            assert step["group_id"] in world.trained and step["reward"] is not None
    assert sum(step["state"] == "trained" for step in steps) == len(world.staleness)
    if policy == "wait":
        assert not any(step["reason"] == "stale" for step in steps)


# Nothing depends on who finishes first


@dataclass
class Hurried(World):
    """A world whose attempts take other times in each `hurry`, and fail all the same."""

    hurry: int = 0

    def attempt(self, name: str, task: Task, address: Address) -> FakeAttempt:
        played = super().attempt(name, task, address)
        return FakeAttempt([random.Random(f"{name} {self.hurry}").random()], played.reward)


def decided(hurry: int, *overrides: str, start: LoopState | None = None) -> tuple[list[str], LoopState, list[str]]:
    world = Hurried(failing=0.4, hurry=hurry)
    options = ("failures.max_failed_fraction=1", "failures.max_sampled=100", "failures.task_limit=2")
    state, steps = train(world, *options, *FEW, *overrides, start=start)
    state = replace(state, wall_seconds=0.0, cpu_seconds=0.0)
    return world.trained, state, sorted({row["group_id"] for row in steps})


FEW = "training.min_group_size=2", "training.group_size=2", "training.tasks_per_update=4"


def test_synchronous_training_does_not_depend_on_who_finishes_first() -> None:
    """Retries, and tasks that are left out, are decided when all attempts have ended."""
    first, *others = (decided(hurry) for hurry in range(4))
    assert others == [first] * 3


def test_a_resumed_run_decides_as_one_that_went_on() -> None:
    trained, state, _ = decided(0)
    begun, there, _ = decided(1, "orchestration.updates=3")
    rest, end, _ = decided(2, start=there)
    assert (begun + rest, end) == (trained, state)
