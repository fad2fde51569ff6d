"""One optimizer update under each packing: of the demo's shape, or replayed from a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from treadle.benchmarks.report import Report, Row, cpu_seconds
from treadle.core.errors import RunError
from treadle.core.files import WrittenFile
from treadle.core.trainer import Trainer, UpdateResult
from treadle.core.types import Group, SamplingParams, Status, Step, StopReason, Task, Trajectory
from treadle.orchestration.config import RunConfig, load_recipe
from treadle.orchestration.store.rollout_store import read_shard
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.packing.layout import Packing
from treadle.training.make import make_trainer

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
    """Return the groups of up to `count` recorded updates of a run, evenly spaced.

    Raises RunError for no such run, or one without a training batch.
    """
    directory = RunDirectory.open(run)
    with closing(directory.ledger()) as ledger:
        shards = ledger.shards()
        rows = ledger.query(
            "SELECT t.shard, g.group_id, g.idx, t.trajectory_id, t.attempt, t.reward "
            "FROM groups g JOIN trajectories t USING (group_id) "
            "WHERE g.split = 'train' AND t.reward IS NOT NULL ORDER BY g.idx, g.group_id, t.attempt"
        )
    if not rows:
        raise RunError(f"run {str(run)!r} has recorded no training batch to replay")
    size = directory.config().groups_per_batch
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


def measure(threads: int, repeats: int, tasks: int = 32, run: Path | None = None) -> Report:
    """Measure CPU seconds of forward, backward and optimizer step for the same groups, under each packing."""
    torch.set_num_threads(threads)
    if run is not None:
        return _replay(run, threads, repeats)
    groups = recorded_groups(tasks)
    trainers = {
        (packing, budget): _trainer(load_recipe("demo"), packing, budget)
        for budget in (2048, 8192)
        for packing in Packing
    }
    with asyncio.Runner() as runner:
        taken = cpu_seconds(
            {
                f"{packing} {budget}": partial(_update, runner, own, groups)
                for (packing, budget), own in trainers.items()
            },
            repeats,
        )
        results = {way: _update(runner, own, groups) for way, own in trainers.items()}
    rows: list[Row] = []
    for (packing, budget), [result] in results.items():
        rows.append(_row(packing, budget, result, taken[f"{packing} {budget}"], taken[f"{Packing.STEP} {budget}"]))
    note = f"the demo's model and shape ({len(groups)} tasks x 8), median of {repeats}, {threads} thread(s)"
    return Report("update", note, rows)


def _replay(run: Path, threads: int, repeats: int) -> Report:
    """Each chosen update of the run, in turn under each packing; the medians over updates."""
    config = RunDirectory.open(run).config()
    budget = config.training.max_tokens_per_microbatch
    trainers = {packing: _trainer(config, packing, budget) for packing in Packing}
    batches = replayed_batches(run, 5 * repeats)
    taken: dict[Packing, list[float]] = {packing: [] for packing in Packing}
    results: dict[Packing, list[UpdateResult]] = {packing: [] for packing in Packing}
    with asyncio.Runner() as runner:
        for batch in [batches[0], *batches]:  # the first only warms up
            for packing, trainer in trainers.items():
                started = time.process_time()
                results[packing] += _update(runner, trainer, batch)
                taken[packing].append(time.process_time() - started)
    step = median(taken[Packing.STEP][1:])
    rows = [
        _row(packing, budget, results[packing][len(batches) // 2], median(taken[packing][1:]), step)
        for packing in Packing
    ]
    note = f"{len(batches)} recorded updates of {run.name}, medians over them, {threads} thread(s); tokens of one"
    return Report("update", note, rows)


def _row(packing: Packing, budget: int, result: UpdateResult, seconds: float, step: float) -> Row:
    return {
        "packing": str(packing),
        "micro-batch tokens": budget,
        "sequences": int(result.metrics["packed_sequences"]),
        "tokens computed": int(result.metrics["packed_tokens"]),
        "CPU s": seconds,
        "times step": step / seconds,
    }


def _trainer(config: RunConfig, packing: Packing, budget: int) -> Trainer:
    one = {"updates_per_batch": 1, "epochs_per_batch": 1}
    changed = {"packing": packing, "max_tokens_per_microbatch": budget, **one}
    training = config.training.model_copy(update=changed)
    return make_trainer(replace(config.trainer, training=training, updates=1000, max_staleness=0, seed=0))


def _update(runner: asyncio.Runner, trainer: Trainer, groups: Sequence[Group]) -> list[UpdateResult]:
    return runner.run(trainer.train_batch(groups))
