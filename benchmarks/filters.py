"""What recorded supports cost (`Step.support`): a run's updates with them, and with them left out.

    treadle train smollm2-tools --name filtered rollout.top_p=0.95 orchestration.updates=2
    python -m benchmarks.filters runs/filtered

Simplified: prompts are those that were recorded, and each attempt's calls follow each other at once.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.measure import Row, Table, make_parser, median_seconds, show
from benchmarks.update import replayed_batches, trainer_of, update
from treadle.core.engine import Engine
from treadle.core.types import Group, Step, Trajectory
from treadle.engines.torch import batch
from treadle.loop.engines import open_serving
from treadle.models.chat import load_chat
from treadle.plan.config import config_of
from treadle.record.rollout_store import write_shard
from treadle.record.run_directory import RunDirectory
from treadle.training.make import load_source


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure CPU seconds of sampling, recording and training, and bytes on the disk; print a table."""
    parser = make_parser(__doc__, repeats=3, threads=True)
    parser.add_argument("run", type=Path, help="a run with engine.kind=torch that sampled with a filter")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    config = config_of(RunDirectory.open(options.run))
    [groups] = replayed_batches(options.run, 1)
    bare = [_map(group, lambda step: replace(step, support=None)) for group in groups]
    _, renderer = load_chat(config.model, None)
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as folder:
        engine = runner.run(open_serving(config.engine, renderer, load_source(config.model, seed=0)))
        trainer = trainer_of(config, config.training.packing, config.training.max_tokens_per_microbatch)
        parts: dict[str, Callable[[Sequence[Group]], object]] = {
            "sampling": lambda groups: runner.run(_play(engine, groups)),
            "shard": lambda groups: write_shard(Path(folder), str(groups is bare), groups),
            "update": lambda groups: update(runner, trainer, groups),
        }
        rows = [_row(name, partial(run, groups), partial(run, bare), options.repeats) for name, run in parts.items()]
        runner.run(engine.close())
        sizes = [_bytes(Path(folder) / f"{name}.parquet") for name in (False, True)]
    total = [sum(float(row[column]) for row in rows) for column in ("CPU s with", "CPU s without")]
    rows.append(_compared("all", *total))
    steps = [step for group in groups for trajectory in group.trajectories for step in trajectory.steps]
    counts = np.concatenate([step.support.counts for step in steps if step.support is not None])
    kept = f"{counts.mean():.1f} ids (median {np.median(counts):g}, 99% {np.percentile(counts, 99):g})"
    note = (
        f"{len(counts)} tokens of {options.run.name}, {kept}, {(sizes[0] - sizes[1]) / len(counts):.1f} bytes a token"
    )
    show(options.json, Table("filters", f"{note}; median of {options.repeats}, {options.threads} thread(s)", rows))


def _row(name: str, run: Callable[[], object], bare: Callable[[], object], repeats: int) -> Row:
    """Measure a part with supports and without them, in turn."""

    def without() -> None:
        with patch.object(batch, "_supports", lambda kept, ids: [None] * len(ids)):
            bare()

    run()
    seconds = median_seconds({"with": run, "without": without}, repeats, time.process_time)
    return _compared(name, seconds["with"], seconds["without"])


def _compared(part: str, seconds: float, without: float) -> Row:
    return {"part": part, "CPU s with": seconds, "CPU s without": without, "more %": 100 * (seconds / without - 1)}


async def _play(engine: Engine, groups: Sequence[Group]) -> None:
    """Sample every recorded call again."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        engine.open_session(trajectory.trajectory_id)
    await asyncio.gather(*(_play_one(engine, trajectory) for trajectory in trajectories))


async def _play_one(engine: Engine, trajectory: Trajectory) -> None:
    for step in trajectory.steps:
        await engine.generate(step.prompt_ids, step.sampling, session=trajectory.trajectory_id)
    engine.close_session(trajectory.trajectory_id)


def _map(group: Group, function: Callable[[Step], Step]) -> Group:
    made = (replace(t, steps=tuple(map(function, t.steps))) for t in group.trajectories)
    return replace(group, trajectories=tuple(made))


def _bytes(file: Path) -> int:
    """Return the size of a shard's columns of supports."""
    metadata = pq.read_metadata(file)
    groups = [metadata.row_group(n) for n in range(metadata.num_row_groups)]
    columns = [group.column(n) for group in groups for n in range(group.num_columns)]
    return sum(c.total_compressed_size for c in columns if c.path_in_schema.startswith("support_"))


if __name__ == "__main__":
    main()
