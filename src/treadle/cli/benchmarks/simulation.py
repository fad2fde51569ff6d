"""Asynchronous training without a model: the loop as it is, a learner and an engine that only take their time.

Simplified: a trajectory's seconds are drawn, its steps take equal shares of them, one after the other, each as soon as
there is a place in the engine; a step has two tokens, its first and its last; environments take no time; nothing fails.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from treadle.core.draws import Stream, call_seed, token_uniforms
from treadle.core.outcomes import as_trained
from treadle.core.types import Group, SamplingParams, Status, Step, StopReason, Task, Trajectory, trajectory_id
from treadle.engines.fake import FakeEngine
from treadle.orchestration.buffer import Late
from treadle.orchestration.callbacks import Callbacks
from treadle.orchestration.config import RunConfig, load_recipe
from treadle.orchestration.ledger import Ledger, LoopState
from treadle.orchestration.loop import Clock, Loop
from treadle.orchestration.metrics import EvaluationResult
from treadle.orchestration.run_directory import RunDirectory
from treadle.orchestration.stopping import StopRequest
from treadle.orchestration.virtual_time import VirtualLoop
from treadle.rollout.session import Address
from treadle.training.fake import FakeTrainer

Seconds = Callable[[float], float]
"""A distribution, as its quantile function: a draw in [0, 1) -> seconds."""

_WARM_UP = 0.1  # share of the updates that rates leave out: at first nothing is under way
_TASKS = 64


def lognormal(mean: float, sigma: float) -> Seconds:
    """exp(N(mu, sigma^2)) of this mean; sigma 0 is constant."""
    normal, scale = NormalDist(), mean * float(np.exp(-(sigma**2) / 2))
    return lambda u: scale * float(np.exp(sigma * normal.inv_cdf(min(max(u, 1e-12), 1 - 1e-12))))


def replayed(seconds: Sequence[float]) -> Seconds:
    """Those, each as probable as another."""
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
        """Trajectories a second that neither engine nor learner could exceed, however they overlap."""
        learner = self.training + self.publication
        return min(self.engine_capacity / self.mean, self.batch / learner if learner else float("inf"))


@dataclass(frozen=True, slots=True)
class Way:
    """How it is trained."""

    max_staleness: int
    late: Late = "mask_steps"


@dataclass(slots=True)
class Seen:
    """What happened.

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
        """Note the groups of an update."""
        live = {t.trajectory_id: as_trained(t).steps for group in groups for t in group.trajectories}
        version = len(self.trained)
        self.trained.append({name: len(steps) for name, steps in live.items()})
        self.staleness += [version - int(s.policy_versions.min()) for steps in live.values() for s in steps]

    def fates(self, steps: int) -> Iterator[tuple[float, int, int]]:
        """(seconds, trained steps, dropped steps) of every trajectory whose group is done with."""
        trained = {name: count for update in self.trained for name, count in update.items()}
        for name, index in self.groups.items():
            if index not in self.outstanding:
                yield self.seconds[name], trained.get(name, 0), steps - trained.get(name, 0)


def simulate(world: World, way: Way) -> Seen:
    """Train `world.updates` updates in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_simulate(world, way))


async def _simulate(world: World, way: Way) -> Seen:
    seen = Seen()
    engine = _Engine(world, seen)

    async def record(part: Group) -> None:
        seen.groups |= {t.trajectory_id: part.index for t in part.trajectories}

    with tempfile.TemporaryDirectory(prefix="treadle-simulation-") as directory:
        run = RunDirectory(Path(directory))
        run.checkpoints.mkdir()
        ledger, stop = Ledger(Path(":memory:")), StopRequest()
        loop = Loop(
            config=_config(world, way),
            run=run,
            ledger=ledger,
            trainer=FakeTrainer(world.training, seen.train),
            weight_sync=engine,
            rollouts=_Rollouts(world, engine, seen),
            train=[Task(f"task-{number}") for number in range(_TASKS)],
            held_out=(),
            state=LoopState(),
            clock=Clock(),
            progress=_Silent(),
            stop=stop,
            callbacks=Callbacks({}, stop),
            record=record,
        )
        state = await loop.run()
        ledger.close()
    seen.outstanding = frozenset((*state.outstanding, *range(state.cursor, max(seen.groups.values()) + 1)))
    return seen


def _config(world: World, way: Way) -> RunConfig:
    """The demo's with these sizes; nothing of its model is used."""
    settings = {
        "seed": world.seed,
        "training.tasks_per_update": world.tasks_per_update,
        "training.group_size": world.group_size,
        "engine.batch": world.engine_capacity,
        "orchestration.updates": world.updates,
        "orchestration.checkpoint_every": world.updates,
        "orchestration.max_staleness": way.max_staleness,
        "orchestration.late": way.late,
    }
    return load_recipe("demo", [f"{key}={value}" for key, value in settings.items()])


class _Engine(FakeEngine):
    """Places for steps, and how much they were used."""

    def __init__(self, world: World, seen: Seen) -> None:
        super().__init__(lambda prompt, sampling: ())
        self._places = asyncio.Semaphore(world.engine_capacity)
        self._publication, self._seen = world.publication, seen
        self._running, self._worked, self._since = 0, 0.0, 0.0

    async def publish(self, version: int) -> None:
        await asyncio.sleep(self._publication)
        await super().publish(version)
        if version:
            self._seen.published.append((asyncio.get_running_loop().time(), self._work()))

    def _work(self) -> float:
        """Steps x seconds so far."""
        now = asyncio.get_running_loop().time()
        self._worked += self._running * (now - self._since)
        self._since = now
        return self._worked

    async def sample(self, seconds: float, steps: int) -> list[Step]:
        """The steps of one trajectory."""
        return [await self._step(seconds / steps) for _ in range(steps)]

    async def _step(self, seconds: float) -> Step:
        clock = asyncio.get_running_loop()
        asked = clock.time()
        async with self._places:
            self._work()
            self._running += 1
            first = self.version
            try:
                await asyncio.sleep(seconds)
            finally:
                self._work()
                self._running -= 1
        versions, waited = np.array([first, self.version], np.int32), clock.time() - asked
        return Step(_PROMPT, _COMPLETION, _LOGPROBS, versions, _SAMPLING, StopReason.STOP, seconds=waited)


_PROMPT, _COMPLETION = np.array([0], np.int32), np.array([1, 2], np.int32)
_LOGPROBS, _SAMPLING = np.full(2, -0.5, np.float32), SamplingParams(max_tokens=2)


class _Rollouts:
    """Plays trajectories of drawn length, keyed by their address; every other attempt succeeds."""

    def __init__(self, world: World, engine: _Engine, seen: Seen) -> None:
        self._world, self._engine, self._seen = world, engine, seen
        self.sampling = SamplingParams()

    def start(
        self, group_id: str, task: Task, addresses: list[Address], sampling: SamplingParams | None = None
    ) -> list[asyncio.Future[Trajectory]]:
        return [asyncio.ensure_future(self._play(trajectory_id(group_id, a.attempt), task, a)) for a in addresses]

    async def _play(self, name: str, task: Task, a: Address) -> Trajectory:
        address = call_seed(a.seed, Stream.BENCH, a.epoch, a.position, a.attempt, 0)
        seconds = self._world.generation(float(token_uniforms(np.array([address], np.uint64), 0)[0]))
        self._seen.seconds[name] = seconds
        steps = await self._engine.sample(seconds, self._world.steps)
        taken, reward = sum(step.seconds for step in steps), float(a.attempt % 2)
        return Trajectory(name, task.task_id, a.attempt, tuple(steps), reward, Status.DONE, seconds=taken)


class _Silent:
    """Progress that nobody watches."""

    def say(self, line: str) -> None: ...

    def phase(self, name: str, total: int) -> None: ...

    def advance(self, done: int, note: str = "") -> None: ...

    def updated(self, row: Mapping[str, Any], updates: int) -> None: ...

    def evaluated(self, result: EvaluationResult) -> None: ...


def figures(world: World, seen: Seen) -> dict[str, float]:
    """Rates and shares of one simulation.

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
