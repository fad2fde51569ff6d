"""Asynchronous training without a model, in virtual time: the real loop, a simulated learner and engine.

Simplified: a trajectory's seconds are drawn; its steps take equal shares of them, one after the other, each as soon as
the engine has a place; a step has two tokens, its first and its last; environments take no time; nothing fails.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from treadle.core.draws import Stream, call_seed, token_uniforms
from treadle.core.outcomes import as_trained
from treadle.core.stop import StopRequest
from treadle.core.types import Group, Task
from treadle.loop.config import StalePolicy
from treadle.loop.loop import Loop, StartingPoint
from treadle.plan.config import RunConfig, load_recipe
from treadle.record.ledger import Ledger
from treadle.record.run_directory import RunDirectory
from treadle.record.run_store import RunStore
from treadle.report.callbacks import Callbacks
from treadle.rollout.rewards import RewardsConfig, RewardShaper
from treadle.rollout.session import Address
from treadle.testing import FakeAttempt, FakeEngine, FakeRunner, FakeTrainer, VirtualLoop

Seconds = Callable[[float], float]
"""A distribution, as its quantile function: a draw in [0, 1) -> seconds."""

_WARM_UP = 0.1  # share of the updates that rates leave out: at first nothing is under way
_TASKS = 64


def lognormal(mean: float, sigma: float) -> Seconds:
    """Return the lognormal distribution exp(N(mu, sigma^2)) with this mean; sigma 0 is constant."""
    normal, scale = NormalDist(), mean * float(np.exp(-(sigma**2) / 2))
    return lambda u: scale * float(np.exp(sigma * normal.inv_cdf(min(max(u, 1e-12), 1 - 1e-12))))


def replayed(seconds: Sequence[float]) -> Seconds:
    """Return the uniform distribution over these seconds."""
    ordered = sorted(seconds)
    return lambda u: ordered[int(u * len(ordered))]


@dataclass(frozen=True, slots=True)
class World:
    """What is simulated.

    Seconds: generation of a trajectory, `mean` on average; training of an update; publication of weights to the engine,
    which samples on meanwhile. engine_capacity: steps that it samples at a time.
    """

    generation: Seconds
    mean: float
    steps: int = 8
    training: float = 45.0
    publication: float = 2.0
    engine_capacity: int = 64
    tasks_per_update: int = 8
    group_size: int = 8
    updates: int = 60
    seed: int = 0

    @property
    def batch(self) -> int:
        """Trajectories of an update."""
        return self.tasks_per_update * self.group_size

    @property
    def bound(self) -> float:
        """Upper bound on trajectories a second, however engine and learner overlap."""
        learner = self.training + self.publication
        return min(self.engine_capacity / self.mean, self.batch / learner if learner else float("inf"))


@dataclass(frozen=True, slots=True)
class StalenessSettings:
    """Staleness settings of training."""

    max_staleness: int
    stale_policy: StalePolicy = "mask_steps"


@dataclass(slots=True)
class SimulatedRun:
    """What happened in a simulation.

    seconds, groups: of each finished trajectory, by its id, what it took and the index of its group; trained: how many
    of its steps. staleness: of every trained step, in order. published: when each update's weights were in use, and the
    steps x seconds that the engine had sampled by then. outstanding: indices of groups that were under way at
    the end.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    trained: list[dict[str, int]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    published: list[tuple[float, float]] = field(default_factory=list)
    outstanding: frozenset[int] = frozenset()

    def train(self, groups: Sequence[Group]) -> None:
        """Record an update."""
        live = {t.trajectory_id: as_trained(t).steps for group in groups for t in group.trajectories}
        version = len(self.trained)
        self.trained.append({name: len(steps) for name, steps in live.items()})
        self.staleness += [version - int(s.policy_versions.min()) for steps in live.values() for s in steps]

    def fates(self, steps: int) -> Iterator[tuple[float, int, int]]:
        """Yield (seconds, trained steps, dropped steps) of every trajectory whose group has finished."""
        trained = {name: count for update in self.trained for name, count in update.items()}
        for name, index in self.groups.items():
            if index not in self.outstanding:
                yield self.seconds[name], trained.get(name, 0), steps - trained.get(name, 0)


def simulate(world: World, settings: StalenessSettings) -> SimulatedRun:
    """Train `world.updates` updates in virtual time and return what happened."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_simulate(world, settings))


async def _simulate(world: World, settings: StalenessSettings) -> SimulatedRun:
    seen = SimulatedRun()
    with (
        tempfile.TemporaryDirectory(prefix="treadle-simulation-") as directory,
        closing(Ledger(Path(":memory:"))) as ledger,
    ):
        run = RunDirectory(Path(directory))
        run.checkpoints.mkdir()
        engine = FakeEngine(lambda prompt, sampling: ())
        runner = FakeRunner(engine, _script(world, seen), world.engine_capacity)
        loop = Loop(
            replace(_config(world, settings).loop, train=[Task(f"task-{number}") for number in range(_TASKS)]),
            FakeTrainer(world.training, seen.train),
            _Publication(world.publication, engine, runner, seen),
            runner,
            RewardShaper(RewardsConfig(), 60.0),
            _Unwritten(run, ledger, seen),
            Callbacks({}, StopRequest()),
            StartingPoint(),
        )
        state = await loop.run()
    seen.outstanding = frozenset((*state.outstanding, *range(state.cursor, max(seen.groups.values()) + 1)))
    return seen


def _config(world: World, staleness: StalenessSettings) -> RunConfig:
    """Return the demo's configuration with these sizes; nothing of its model is used."""
    settings = {
        "seed": world.seed,
        "training.tasks_per_update": world.tasks_per_update,
        "training.group_size": world.group_size,
        "engine.batch": world.engine_capacity,
        "orchestration.updates": world.updates,
        "orchestration.checkpoint_every": world.updates,
        "orchestration.max_staleness": staleness.max_staleness,
        "orchestration.stale_policy": staleness.stale_policy,
    }
    return load_recipe("demo", [f"{key}={value}" for key, value in settings.items()])


def _script(world: World, seen: SimulatedRun) -> Callable[[str, Task, Address], FakeAttempt]:
    """Return attempts of drawn length, keyed by their address, in equal steps; every other one succeeds."""

    def script(name: str, task: Task, a: Address) -> FakeAttempt:
        address = call_seed(a.seed, Stream.BENCH, a.epoch, a.position, a.attempt, 0)
        seconds = world.generation(float(token_uniforms(np.array([address], np.uint64), 0)[0]))
        seen.seconds[name] = seconds
        return FakeAttempt([seconds / world.steps] * world.steps, float(a.attempt % 2))

    return script


@dataclass(frozen=True, slots=True)
class _Publication:
    """Weight sync that takes `seconds`."""

    seconds: float
    engine: FakeEngine
    runner: FakeRunner
    seen: SimulatedRun

    async def publish(self, version: int) -> None:
        await asyncio.sleep(self.seconds)
        await self.engine.publish(version)
        if version:
            self.seen.published.append((asyncio.get_running_loop().time(), self.runner.step_seconds()))


class _Unwritten(RunStore):
    """Run store that remembers the group of each attempt and writes nothing."""

    def __init__(self, run: RunDirectory, ledger: Ledger, seen: SimulatedRun) -> None:
        super().__init__(run, ledger)
        self._seen = seen

    async def record(self, part: Group, version: int) -> None:
        self._seen.groups |= {t.trajectory_id: part.index for t in part.trajectories}


def figures(world: World, seen: SimulatedRun) -> dict[str, float]:
    """Return rates and shares of one simulation.

    Rates leave out the first tenth of the updates. A trajectory counts as trained by the share of its steps that were;
    means over trajectories are weighted so.
    """
    first = round(_WARM_UP * len(seen.published))
    (started, sampled), (ended, sampled_at_end) = seen.published[first], seen.published[-1]
    elapsed, updates = ended - started, len(seen.published) - 1 - first
    trained = sum(sum(update.values()) for update in seen.trained[first + 1 :]) / world.steps
    fates = list(seen.fates(world.steps))
    kept, lost = (sum(fate[which] for fate in fates) for which in (1, 2))
    return {
        "trajectories/s": trained / elapsed,
        "of bound": trained / elapsed / world.bound,
        "engine idle": 1 - (sampled_at_end - sampled) / world.engine_capacity / elapsed,
        "learner idle": 1 - updates * (world.training + world.publication) / elapsed,
        "staleness mean": float(np.mean(seen.staleness)),
        "staleness max": max(seen.staleness),
        "dropped": lost / (kept + lost),
        "s trained": sum(seconds * steps for seconds, steps, _ in fates) / kept,
        "s dropped": sum(seconds * steps for seconds, _, steps in fates) / lost if lost else 0.0,
    }
