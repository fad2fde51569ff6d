"""What a resumed run need not sample again: finished attempts that its checkpoint still admits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.core.errors import Cause
from treadle.core.metrics import Measures
from treadle.core.outcomes import reason_on_record
from treadle.core.types import Failure, Group, Status, Task, Trajectory
from treadle.orchestration.ledger import Ledger, LoopState
from treadle.orchestration.rollout_store import read_steps


def reusable(ledger: Ledger, rollouts: Path, state: LoopState, max_staleness: int) -> dict[int, Group]:
    """Index -> group with its attempts on record, where all of those can be trained by the checkpoint's next update.

    Tokens may be `max_staleness` versions old, and none may be of a version that the checkpoint has not reached: its
    weights were lost. At max_staleness 0 a batch is sampled again whole, so that it repeats bit for bit.
    """
    if max_staleness == 0:
        return {}
    rows = itertools.groupby(ledger.untaken(state), lambda row: row["idx"])
    groups = {index: list(trajectories) for index, trajectories in rows}
    oldest = state.version - max_staleness
    return {
        index: _group(trajectories, rollouts)
        for index, trajectories in groups.items()
        if all(_admitted(row, oldest, state.version) and (rollouts / row["shard"]).is_file() for row in trajectories)
    }


def _admitted(row: Mapping[str, Any], oldest: int, newest: int) -> bool:
    if row["trained_reward"] is None or row["oldest_version"] is None:  # nothing of it is trained: of any version
        return True
    return bool(row["waiting"] and oldest <= row["oldest_version"] and row["newest_version"] <= newest)


def _group(rows: list[dict[str, Any]], rollouts: Path) -> Group:
    first = rows[0]
    task = Task(**json.loads(first["task"]))
    trajectories = tuple(_trajectory(row, task.task_id, rollouts) for row in rows)
    return Group(first["group_id"], first["idx"], first["epoch"], first["position"], task, trajectories)


def _trajectory(row: Mapping[str, Any], task_id: str, rollouts: Path) -> Trajectory:
    cause = row["failure_cause"]
    return Trajectory(
        trajectory_id=row["trajectory_id"],
        task_id=task_id,
        attempt=row["attempt"],
        steps=tuple(read_steps(rollouts, row["shard"], row["trajectory_id"])),
        reward=row["reward"],
        status=Status(row["status"]),
        failure=Failure(Cause(cause), row["failure_message"]) if cause else None,
        warning=row["warning"],
        seconds=row["seconds"],
        metrics=Measures.from_json(json.loads(row["metrics"])),
        dropped=reason_on_record(row["reward"], row["trained_reward"]),
    )
