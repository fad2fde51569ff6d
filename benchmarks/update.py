"""One optimizer update under each packing: of the demo's shape, or replayed from a run.

python -m benchmarks.update
python -m benchmarks.update --replay runs/demo --threads 2
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Row, Table, cpu_seconds, make_parser, show
from treadle.core.files import WrittenFile
from treadle.core.trainer import Trainer, UpdateResult
from treadle.core.types import Group, SamplingParams, Status, Step, StopReason, Task, Trajectory
from treadle.packing.layout import Packing
from treadle.plan.config import RunConfig, config_of, load_recipe
from treadle.record.rollout_store import read_shard
from treadle.record.run_directory import RunDirectory
from treadle.training.start import make_trainer

_VOCABULARY = 704


def recorded_groups(tasks: int = 32, group_size: int = 8) -> list[Group]:
    """Return groups of append-only trajectories of 1 to 4 steps, as in the demo; random ids, rewards 0 and 1."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return rng.integers(3, _VOCABULARY, count).astype(np.int32)

    def trajectory(task: int, attempt: int, prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Trajectory:
        steps = []
        for _ in range(1 + int(rng.integers(4))):
            sampled = ids(5)
            logprobs, versions = np.full(5, -1.0, np.float32), np.zeros(5, np.int32)
            steps.append(Step(prompt, sampled, logprobs, versions, SamplingParams(max_tokens=12), StopReason.STOP))
            prompt = np.concatenate([prompt, sampled, ids(20)])
        name = f"g{task:06d}.{attempt}"
        return Trajectory(name, str(task), attempt, tuple(steps), float(rng.integers(2)), Status.DONE)

    groups = []
    for task in range(tasks):
        prompt = ids(28)
        trajectories = tuple(trajectory(task, attempt, prompt) for attempt in range(group_size))
        groups.append(Group(f"g{task:06d}", task, 0, task, Task(str(task)), trajectories))
    return groups


def replayed_batches(run: Path, count: int) -> list[list[Group]]:
    """Return the groups of up to `count` recorded updates of a run, evenly spaced."""
    directory = RunDirectory.open(run)
    ledger = directory.ledger()
    shards = ledger.shards()
    rows = [row for row in ledger.training() if row["reward"] is not None]
    if not rows:
        raise SystemExit(f"run {str(run)!r} has no training batch to replay")
    size = config_of(directory).training.groups_per_batch
    batches = list(dict.fromkeys(row["idx"] // size for row in rows))
    chosen = [batches[i] for i in np.unique(np.linspace(0, len(batches) - 1, count).astype(int))]
    return [
        _replayed(directory.rollouts, shards, [row for row in rows if row["idx"] // size == number])
        for number in chosen
    ]


def _replayed(folder: Path, shards: Mapping[str, WrittenFile], rows: Sequence[Mapping[str, Any]]) -> list[Group]:
    steps: dict[str, list[Step]] = {}
    for shard in {row["shard"] for row in rows}:
        steps |= read_shard(folder, shards[shard])
    groups: dict[str, list[Trajectory]] = {}
    for row in rows:
        name = row["trajectory_id"]
        made = Trajectory(name, row["group_id"], row["attempt"], tuple(steps.get(name, ())), row["reward"], Status.DONE)
        groups.setdefault(row["group_id"], []).append(made)
    return [Group(name, i, 0, i, Task(name), tuple(made)) for i, (name, made) in enumerate(groups.items())]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure CPU seconds of forward, backward and optimizer step under each packing; print a table."""
    parser = make_parser(__doc__, repeats=3, threads=True)
    parser.add_argument("--replay", type=Path, metavar="RUN", help="replay recorded batches of this run")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.replay:
        table = replay(options.replay, options.repeats)
    else:
        table = measure(recorded_groups(2 if options.small else 32), options.repeats)
    show(options.json, table)


def measure(groups: Sequence[Group], repeats: int) -> Table:
    """Measure an update on the same groups under each packing and two micro-batch budgets."""
    ways = [(packing, budget) for budget in (2048, 8192) for packing in Packing]
    trainers = {way: trainer_of(load_recipe("demo"), *way) for way in ways}
    with asyncio.Runner() as runner:
        runs = {str(way): partial(update, runner, trainer, groups) for way, trainer in trainers.items()}
        seconds = cpu_seconds(runs, repeats)
        results = {way: update(runner, trainer, groups)[0] for way, trainer in trainers.items()}
    rows = [
        _row(packing, budget, result, seconds[str((packing, budget))], seconds[str((Packing.STEP, budget))])
        for (packing, budget), result in results.items()
    ]
    note = f"the demo's model and shape ({len(groups)} tasks x 8), median of {repeats}, {_threads()}"
    return Table("update", note, rows)


def replay(run: Path, repeats: int) -> Table:
    """Measure some of a run's updates under each packing, in turn; medians over updates."""
    config = config_of(RunDirectory.open(run))
    budget = config.training.max_tokens_per_microbatch
    trainers = {packing: trainer_of(config, packing, budget) for packing in Packing}
    batches = replayed_batches(run, 5 * repeats)
    seconds: dict[Packing, list[float]] = {packing: [] for packing in Packing}
    results: dict[Packing, list[UpdateResult]] = {packing: [] for packing in Packing}
    with asyncio.Runner() as runner:
        for batch in [batches[0], *batches]:  # the first only warms up
            for packing, trainer in trainers.items():
                started = time.process_time()
                results[packing] += update(runner, trainer, batch)
                seconds[packing].append(time.process_time() - started)
    step = median(seconds[Packing.STEP][1:])
    middle = len(batches) // 2
    rows = [_row(p, budget, results[p][middle], median(seconds[p][1:]), step) for p in Packing]
    note = f"{len(batches)} recorded updates of {run.name}, medians over them, {_threads()}; tokens of one"
    return Table("update", note, rows)


def _threads() -> str:
    return f"{torch.get_num_threads()} thread(s)"


def _row(packing: Packing, budget: int, result: UpdateResult, seconds: float, step: float) -> Row:
    return {
        "packing": str(packing),
        "micro-batch tokens": budget,
        "sequences": int(result.metrics["packed_sequences"]),
        "tokens computed": int(result.metrics["packed_tokens"]),
        "CPU s": seconds,
        "times step": step / seconds,
    }


def trainer_of(config: RunConfig, packing: Packing, budget: int) -> Trainer:
    one = {"updates_per_batch": 1, "epochs_per_batch": 1}
    changed = {"packing": packing, "max_tokens_per_microbatch": budget, **one}
    training = config.training.model_copy(update=changed)
    return make_trainer(replace(config.trainer, training=training, updates=1000, max_staleness=0, seed=0))


def update(runner: asyncio.Runner, trainer: Trainer, groups: Sequence[Group]) -> list[UpdateResult]:
    return runner.run(trainer.train_batch(groups))


if __name__ == "__main__":
    main()
