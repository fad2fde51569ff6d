"""What a run's own process spends on many open sessions: CPU, and the lag of its event loop.

    python -m benchmarks.many_sessions                  10,000 sessions, 50 trajectories a second, one minute
    python -m benchmarks.many_sessions --rate 100
    python -m benchmarks.many_sessions --through ray --sessions 2000 --rate 50 80

    4 workers --(pickled trajectories)--> RolloutScheduler -> RunStore -> Groups -> batches

Real: the loop, the ledger, the files, the channels. Simplified: workers only let time pass, about as long for all
attempts of a group, and then send a trajectory of 8 steps x 4,096 tokens each; the groups that are there at first are
at any point of their course, so that as many end at any time. The learner takes no time and writes no weights.

--through ray: workers and engines are those of `placement.kind=ray`, and workers play; only what computes in an engine
is replaced, by something that lets time pass.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import machine
from treadle.core.engine import Completion, VersionSpan
from treadle.core.rewards import Reward
from treadle.core.stop import StopRequest
from treadle.core.types import Group, Ids, SamplingParams, Status, Step, StopReason, Task, Trajectory, trajectory_id
from treadle.engines.pool import EnginePool
from treadle.engines.torch.engine import Limits
from treadle.loop.loop import Loop, StartingPoint
from treadle.models.chat import load_chat
from treadle.plan.config import RunConfig, load_recipe
from treadle.record.ledger import Ledger
from treadle.record.run_directory import RunDirectory
from treadle.record.run_store import RunStore
from treadle.report.callbacks import Callbacks
from treadle.rollout.attempt import NO_PREFIXES, CallLog, Players, RolloutRunner
from treadle.rollout.config import RolloutConfig
from treadle.rollout.drivers.driver import AttemptDriver
from treadle.rollout.drivers.outcome import Outcome, outcome_of
from treadle.rollout.isolation.user_code import UserCode
from treadle.rollout.replay import Prefix
from treadle.rollout.rewards import RewardsConfig, RewardShaper
from treadle.rollout.session import Address, Session
from treadle.testing import FakeEngine, FakeTrainer

RESULTS = Path(__file__).parent / "results" / "many_sessions.json"
WORKERS, ENGINES, STEPS, TOKENS, SAMPLED = 4, 2, 8, 4096, 256  # tokens: of a step, prompt and completion
GROUP, TASKS = 8, 32
_VOCABULARY = 700  # of the recipe's tokenizer, about
SETTLE, LOOK = 20.0, 0.01  # seconds before measuring; between two looks at the event loop


def worker(channel: Connection, mean: float, at_first: int, seed: int) -> None:
    """Answer each (name, task, attempt, version) of a group with a trajectory, after a while.

    mean: seconds that it takes. at_first: groups that have begun before.
    """
    asyncio.run(_worker(channel, mean, at_first, seed))


async def _worker(channel: Connection, mean: float, at_first: int, seed: int) -> None:
    rng, loop, ended = np.random.default_rng(seed), asyncio.get_running_loop(), asyncio.Event()
    sending = ThreadPoolExecutor(1)  # reading goes on while the channel is full: the other end may wait for that

    def send(name: str, task: str, attempt: int, version: int, seconds: float) -> None:
        steps = tuple(_step(rng, version, seconds / STEPS) for _ in range(STEPS))
        played = Trajectory(name, task, attempt, steps, float(attempt % 2), Status.DONE, seconds=seconds)
        sending.submit(channel.send_bytes, pickle.dumps(played, pickle.HIGHEST_PROTOCOL))

    def read() -> None:
        nonlocal at_first
        try:
            group = channel.recv()
            base = mean * (float(rng.random()) if at_first > 0 else 1.0)
            at_first -= 1
            for name, task, attempt, version in group:
                seconds = base * float(rng.uniform(0.9, 1.1))
                loop.call_later(seconds, partial(send, name, task, attempt, version, seconds))
        except EOFError:
            ended.set()

    loop.add_reader(channel.fileno(), read)
    await ended.wait()


def _step(rng: np.random.Generator, version: int, seconds: float) -> Step:
    ids = rng.integers(0, 150_000, TOKENS, dtype=np.int32)
    return Step(
        prompt_ids=ids[SAMPLED:],
        completion_ids=ids[:SAMPLED],
        logprobs=-rng.random(SAMPLED, dtype=np.float32),
        policy_versions=np.full(SAMPLED, version, np.int32),
        sampling=SamplingParams(max_tokens=SAMPLED),
        stop_reason=StopReason.STOP,
        seconds=seconds,
    )


class Caller(AttemptDriver[Session]):
    """Driver that makes one call after the other, with prompts of random ids."""

    async def play(self, session: Session, task: Task, user: UserCode) -> Outcome:
        rng = np.random.default_rng(list(session.name.encode()))
        for _ in range(STEPS):
            await session.complete(rng.integers(0, _VOCABULARY, TOKENS - SAMPLED).tolist())
        session.reward_last(Reward.of(float(rng.integers(2))))
        return outcome_of(session.steps, None, user.cause)


class SimulatedEngine(FakeEngine):
    """Engine that answers with random ids after a while, about as long for all calls of a group.

    mean: seconds of an attempt. at_first: groups that have begun before.
    """

    limits = Limits(_VOCABULARY, 2 * TOKENS)

    def __init__(self, mean: float, at_first: int) -> None:
        super().__init__(lambda prompt, sampling: ())
        self._mean, self._at_first = mean, at_first
        self._rng = np.random.default_rng(0)
        self._ids = self._rng.integers(0, _VOCABULARY, SAMPLED, dtype=np.int32)
        self._logprobs = np.full(SAMPLED, -0.5, np.float32)
        self._seconds: dict[str, float] = {}  # of a group's attempts

    def open_session(self, session: str) -> None:
        """Decide how long the group takes."""
        group = session.rpartition(".")[0]
        if group not in self._seconds:
            began = len(self._seconds) < self._at_first
            share = float(np.random.default_rng(list(group.encode())).random())  # the same in every engine
            self._seconds[group] = self._mean * (share if began else 1.0)

    def close_session(self, session: str) -> None:
        return None

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        """Return the same ids each time."""
        seconds = self._seconds[session.rpartition(".")[0]] * float(self._rng.uniform(0.9, 1.1))
        await asyncio.sleep(seconds / STEPS)
        return Completion(self._ids, self._logprobs, StopReason.STOP, (VersionSpan(self.version, 0, SAMPLED),))


class Counted:
    """`RolloutRunner` that counts what another one has played."""

    def __init__(self, runner: RolloutRunner) -> None:
        self._runner, self.sampling = runner, runner.sampling
        self.received = self.open = 0

    def start(
        self,
        group_id: str,
        task: Task,
        addresses: list[Address],
        sampling: SamplingParams | None = None,
        log: CallLog | None = None,
        prefixes: Mapping[int, Prefix] = NO_PREFIXES,
    ) -> list[asyncio.Future[Trajectory]]:
        """Start the attempts."""
        attempts = self._runner.start(group_id, task, addresses, sampling, log)
        self.open += len(attempts)
        for attempt in attempts:
            attempt.add_done_callback(self._played)
        return attempts

    def _played(self, attempt: asyncio.Future[Trajectory]) -> None:
        self.open -= 1
        if not attempt.cancelled():
            assert attempt.result().failure is None, attempt.result().failure
            self.received += 1


class WorkerRunner:
    """`RolloutRunner` over worker processes, which take groups in turn."""

    def __init__(self, channels: Sequence[Connection], engine: FakeEngine) -> None:
        self.sampling, self.received = SamplingParams(), 0
        self._channels, self._engine = channels, engine
        self._turn = 0
        self._waiting: dict[str, asyncio.Future[Trajectory]] = {}
        for channel in channels:
            asyncio.get_running_loop().add_reader(channel.fileno(), self._read, channel)

    def start(
        self,
        group_id: str,
        task: Task,
        addresses: list[Address],
        sampling: SamplingParams | None = None,
        log: CallLog | None = None,
        prefixes: Mapping[int, Prefix] = NO_PREFIXES,
    ) -> list[asyncio.Future[Trajectory]]:
        """Send the attempts of a group to one worker; return their futures."""
        names = [trajectory_id(group_id, address.attempt) for address in addresses]
        futures = [asyncio.get_running_loop().create_future() for _ in names]
        self._waiting |= zip(names, futures, strict=True)
        self._turn = (self._turn + 1) % len(self._channels)
        version = self._engine.version
        wanted = [(name, task.task_id, a.attempt, version) for name, a in zip(names, addresses, strict=True)]
        self._channels[self._turn].send(wanted)
        return futures

    @property
    def open(self) -> int:
        """Number of attempts under way."""
        return len(self._waiting)

    def _read(self, channel: Connection) -> None:
        played: Trajectory = pickle.loads(channel.recv_bytes())
        self.received += 1
        future = self._waiting.pop(played.trajectory_id)
        if not future.done():
            future.set_result(played)


def _config(sessions: int) -> RunConfig:
    settings = {
        "training.tasks_per_update": TASKS,
        "training.group_size": GROUP,
        "engine.batch": sessions,
        "orchestration.updates": 10**6,
        "orchestration.checkpoint_every": 10**6,
        "orchestration.max_staleness": sessions,
    }
    return load_recipe("demo", [f"{key}={value}" for key, value in settings.items()])


async def _measure(opening: OpenRunner, sessions: int, settle: float, seconds: float, folder: Path) -> dict[str, Any]:
    async with opening() as (runner, engine):
        return await _measured(runner, engine, sessions, settle, seconds, folder)


async def _measured(
    runner: WorkerRunner | Counted, engine: FakeEngine, sessions: int, settle: float, seconds: float, folder: Path
) -> dict[str, Any]:
    stop, batches = StopRequest(), list[int]()
    run = RunDirectory(folder)
    for directory in (run.rollouts, run.traces, run.checkpoints):
        directory.mkdir()

    def trained(groups: Sequence[Group]) -> None:
        batches.append(len(groups))

    with closing(Ledger(run.ledger_file)) as ledger:
        loop = Loop(
            replace(_config(sessions).loop, train=[Task(f"task-{number}", driver="caller") for number in range(1024)]),
            FakeTrainer(0.0, trained),
            engine,
            runner,
            RewardShaper(RewardsConfig(), 60.0),
            RunStore(run, ledger),
            Callbacks({}, stop),
            StartingPoint(),
        )
        training = asyncio.ensure_future(loop.run())
        await asyncio.sleep(settle)
        before, first, played = time.process_time(), time.perf_counter(), runner.received
        lags = await _lags(seconds, training)
        cpu, wall = time.process_time() - before, time.perf_counter() - first
        finished, opened = runner.received - played, runner.open
        stop.request()
        await training
        [rows] = ledger.query("SELECT count(*) AS n FROM steps")
    return {
        "sessions": opened,
        "workers": WORKERS,
        "trajectories/s": finished / wall,
        "cpu_share": cpu / wall,
        "cpu_ms_per_trajectory": 1e3 * cpu / finished,
        "loop_lag_ms_p50": 1e3 * float(np.quantile(lags, 0.5)),
        "loop_lag_ms_p99": 1e3 * float(np.quantile(lags, 0.99)),
        "loop_lag_ms_max": 1e3 * max(lags),
        "batches": len(batches),
        "steps_recorded": rows["n"],
    }


async def _lags(seconds: float, training: asyncio.Future[Any]) -> list[float]:
    """Return by how much short sleeps took longer, for so many seconds."""
    loop, lags = asyncio.get_running_loop(), list[float]()
    end = loop.time() + seconds
    while (now := loop.time()) < end:
        if training.done():
            training.result()
        await asyncio.sleep(LOOK)
        lags.append(max(0.0, loop.time() - now - LOOK))
    return lags


OpenRunner = Callable[[], AbstractAsyncContextManager[tuple[WorkerRunner | Counted, FakeEngine]]]


@contextmanager
def forked(sessions: int, rate: float) -> Iterator[OpenRunner]:
    """Start workers that send whole trajectories."""
    context, channels, processes = multiprocessing.get_context("fork"), [], []
    for number in range(WORKERS):
        here, there = context.Pipe()
        process = context.Process(
            target=worker, args=(there, sessions / rate, sessions // GROUP // WORKERS, number), daemon=True
        )
        process.start()  # a fork, which has everything imported
        there.close()
        channels.append(here)
        processes.append(process)

    @asynccontextmanager
    async def opening() -> AsyncIterator[tuple[WorkerRunner, FakeEngine]]:
        engine = FakeEngine(lambda prompt, sampling: ())
        yield WorkerRunner(channels, engine), engine

    try:
        yield opening
    finally:
        for channel, process in zip(channels, processes, strict=True):
            channel.close()
            process.terminate()
            process.join()


@contextmanager
def over_ray(sessions: int, rate: float) -> Iterator[OpenRunner]:
    """Start the workers and engines of a local Ray cluster."""
    from treadle.engines.remote import RemoteEngine
    from treadle.placement.actors import Actor
    from treadle.placement.engine_actors import EngineActor
    from treadle.placement.reserve import Bundle, reserve
    from treadle.placement.rollout_actors import open_workers
    from treadle.placement.runtime import connected

    workers = [Bundle("rollout worker", number, {"CPU": 1}) for number in range(WORKERS)]
    engines = [Bundle("engine", number, {"CPU": 1}) for number in range(ENGINES)]
    config = load_recipe("demo", []).model
    make: Any = partial(SimulatedEngine, sessions / rate, sessions // GROUP)
    rollout = RolloutConfig(max_input_tokens=TOKENS, max_completion_tokens=SAMPLED, trajectory_timeout=1e6)
    with connected(None, [*workers, *engines], print), reserve([*workers, *engines], 60) as reservation:

        @asynccontextmanager
        async def opening() -> AsyncIterator[tuple[Counted, FakeEngine]]:
            remote = [
                RemoteEngine(
                    str(b),
                    make,
                    partial(Actor, str(b), EngineActor, reservation.options(b)),
                    lock_step=False,
                    tolerance=1e-6,
                )
                for b in engines
            ]
            await asyncio.gather(*(engine.open() for engine in remote))
            pool = EnginePool(remote)
            players = Players(drivers={"caller": Caller})
            renderer = load_chat(config, None)[1]
            try:
                async with open_workers(
                    reservation, pool, renderer, players, rollout, RewardsConfig(), print, None
                ) as runner:
                    yield Counted(runner), FakeEngine(lambda prompt, sampling: ())
            finally:
                await pool.close()

        yield opening


THROUGH = {"pipes": forked, "ray": over_ray}


def measure(through: str, sessions: int, rate: float, settle: float, seconds: float) -> dict[str, Any]:
    """Return the figures of so many open sessions, of which `rate` end a second."""
    with THROUGH[through](sessions, rate) as opening, tempfile.TemporaryDirectory(prefix="treadle-sessions-") as folder:
        return {"through": through, **asyncio.run(_measure(opening, sessions, settle, seconds, Path(folder)))}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--rate", type=float, nargs="+", default=[50.0], help="trajectories a second")
    parser.add_argument("--through", choices=THROUGH, nargs="+", default=["pipes"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=SETTLE, help="seconds before measuring")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for through, rate in itertools.product(options.through, options.rate):
        rows.append(measure(through, options.sessions, rate, options.settle, options.seconds))
        print(json.dumps(rows[-1]))
    note = f"{STEPS} steps of {TOKENS} tokens, {SAMPLED} of them sampled"
    data = {"benchmark": "many_sessions", "note": note, "machine": machine(), "rows": rows}
    options.output.write_text(json.dumps(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
