"""What `treadle report` says, as plain data: counted in the ledger, and token by token in the rollout shards."""

from __future__ import annotations

import fcntl
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from treadle.orchestration.ledger import Ledger
from treadle.orchestration.run_directory import RunDirectory
from treadle.packing.flat import Span
from treadle.packing.layout import Packing, pack

_ROWS = 512  # steps held in memory at a time


def run_facts(run: RunDirectory, on_shard: Callable[[int, int], None]) -> dict[str, Any]:
    """Everything the report shows. on_shard(done, total) is called after each shard. Raises TreadleError."""
    config, metrics = run.config(), run.metrics()
    updates = [row for row in metrics if row["kind"] == "update"]
    ledger = Ledger(run.ledger_file, read_only=True)
    try:
        latest = ledger.latest_checkpoint()
        return {
            "run": str(run.path),
            "recipe": config.recipe,
            "seed": config.seed,
            "state": _state(run),
            "update": updates[-1]["update"] if updates else 0,
            "updates": config.orchestration.updates,
            "last_update": updates[-1] if updates else None,
            "splits": _splits(ledger),
            "steps": ledger.query(
                "SELECT g.split, s.state, s.reason, count(*) AS count FROM steps s JOIN trajectories t USING "
                "(trajectory_id) JOIN groups g USING (group_id) GROUP BY 1, 2, 3 ORDER BY 1 DESC, 4 DESC"
            ),
            "statuses": ledger.query(
                "SELECT g.split, t.status, count(*) AS count FROM trajectories t JOIN groups g USING (group_id) "
                "GROUP BY 1, 2 ORDER BY 1 DESC, 3 DESC"
            ),
            "stop_reasons": ledger.query(
                "SELECT g.split, s.stop_reason, count(*) AS count FROM steps s JOIN trajectories t USING "
                "(trajectory_id) JOIN groups g USING (group_id) GROUP BY 1, 2 ORDER BY 1 DESC, 3 DESC"
            ),
            "failures": _failures(ledger),
            "warnings": ledger.query(
                "SELECT warning AS message, count(*) AS count, min(trajectory_id) AS trajectory_id FROM trajectories "
                "WHERE warning != '' GROUP BY 1 ORDER BY 2 DESC LIMIT 5"
            ),
            "packing": _packing(run, ledger, on_shard),
            "evaluations": [row for row in metrics if row["kind"] == "evaluation"],
            "checkpoints": sorted(path.name for path in run.checkpoints.glob("step-*")),
            "latest_checkpoint": latest[0] if latest else None,
        }
    finally:
        ledger.close()


def _state(run: RunDirectory) -> str:
    """finished, in progress (a process holds the lock), or stopped."""
    if run.summary_file.is_file():
        return "finished"
    try:
        with (run.path / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return "stopped"
    except BlockingIOError:
        return "in progress"
    return "stopped"


def _splits(ledger: Ledger) -> list[dict[str, Any]]:
    """Groups, trajectories, steps and tokens of each split."""
    return ledger.query(
        "SELECT g.split, count(DISTINCT g.group_id) AS groups, count(DISTINCT t.trajectory_id) AS trajectories, "
        "count(s.step) AS steps, coalesce(sum(s.prompt_tokens), 0) AS prompt_tokens, "
        "coalesce(sum(s.completion_tokens), 0) AS completion_tokens FROM groups g "
        "LEFT JOIN trajectories t USING (group_id) LEFT JOIN steps s USING (trajectory_id) GROUP BY 1 ORDER BY 1 DESC"
    )


def _failures(ledger: Ledger) -> list[dict[str, Any]]:
    """Each cause once, with its most frequent message and a trajectory that shows it."""
    rows = ledger.query(
        "SELECT failure_cause AS cause, failure_message AS message, count(*) AS count, min(trajectory_id) AS "
        "trajectory_id FROM trajectories WHERE failure_cause IS NOT NULL GROUP BY 1, 2 ORDER BY 1, 3 DESC"
    )
    found = []
    for _cause, group in itertools.groupby(rows, lambda row: row["cause"]):
        same = list(group)
        found.append({**same[0], "count": sum(row["count"] for row in same)})
    return sorted(found, key=lambda row: -row["count"])


# --- tokens to compute ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PackingCount:
    """Tokens a forward pass computes for the same steps under either packing."""

    trajectories: int = 0
    step: int = 0
    chain: int = 0


def _packing(run: RunDirectory, ledger: Ledger, on_shard: Callable[[int, int], None]) -> dict[str, Any]:
    """Over the training steps that were trained or still will be, shard by shard."""
    shards = [row["shard"] for row in ledger.query("SELECT DISTINCT shard FROM groups WHERE split = 'train'")]
    count, missing = PackingCount(), []
    for number, shard in enumerate(shards, 1):
        wanted = ledger.query(
            "SELECT DISTINCT trajectory_id FROM groups JOIN trajectories USING (group_id) JOIN steps USING "
            "(trajectory_id) WHERE shard = ? AND state IN ('trained', 'recorded')",
            shard,
        )
        if (run.rollouts / shard).is_file():
            _count(run.rollouts / shard, {row["trajectory_id"] for row in wanted}, count)
        else:
            missing.append(shard)
        on_shard(number, len(shards))
    ratio = count.step / count.chain if count.chain else None
    return {
        "trajectories": count.trajectories,
        "step": count.step,
        "chain": count.chain,
        "ratio": ratio,
        "missing_shards": missing,
    }


def _count(shard: Path, wanted: set[str], count: PackingCount) -> None:
    for trajectory, spans in _trajectories(shard):
        if trajectory in wanted:
            count.trajectories += 1
            count.step += sum(len(s.token_ids) for s in pack(spans, Packing.STEP))
            count.chain += sum(len(s.token_ids) for s in pack(spans, Packing.CHAIN))


def _trajectories(shard: Path) -> Iterator[tuple[str, list[Span]]]:
    """(trajectory id, its calls) one after the other: a shard holds each trajectory's steps in a row and in order."""
    for trajectory, rows in itertools.groupby(_calls(shard), lambda row: row[0]):
        yield trajectory, [span for _, span in rows]


def _calls(shard: Path) -> Iterator[tuple[str, Span]]:
    with pq.ParquetFile(shard) as file:
        for batch in file.iter_batches(_ROWS, columns=["trajectory_id", "prompt_ids", "completion_ids"]):
            names = batch.column("trajectory_id").to_pylist()
            prompts, completions = (_arrays(batch.column(name)) for name in ("prompt_ids", "completion_ids"))
            for name, prompt, completion in zip(names, prompts, completions, strict=True):
                yield name, Span(prompt, completion, first=0, owner=0)


def _arrays(column: pa.ListArray) -> list[Any]:
    """The rows of a list column as numpy views, without a Python object for each token."""
    values, offsets = column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy(zero_copy_only=False)
    return [values[start:end] for start, end in itertools.pairwise(offsets.tolist())]
