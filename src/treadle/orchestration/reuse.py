"""What a resumed run need not sample again: finished attempts that its checkpoint still admits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.core.errors import Cause, DamageError
from treadle.core.files import WrittenFile
from treadle.core.metrics import Measures
from treadle.core.outcomes import reason_on_record
from treadle.core.types import Failure, Group, Status, Step, Task, Trajectory
from treadle.orchestration.ledger import Ledger, LoopState
from treadle.orchestration.rollout_store import read_shard


@dataclass(frozen=True, slots=True)
class OnRecord:
    """What is on record beyond what a checkpoint contains, and could be trained by its next update.

    groups: with their attempts, by index. damaged: shard -> ids of attempts in it that cannot be read.
    """

    groups: dict[int, Group] = field(default_factory=dict)
    damaged: dict[str, list[str]] = field(default_factory=dict)


def reusable(ledger: Ledger, rollouts: Path, state: LoopState, max_staleness: int) -> OnRecord:
    """Find the groups whose attempts on record can all be trained by the checkpoint's next update.

    Tokens may be `max_staleness` versions old, and none may be of a version that the checkpoint has not reached: its
    weights were lost. At max_staleness 0 a batch is sampled again whole, so that it repeats bit for bit. An attempt
    that is damaged takes its group along: the others would be compared with something else.
    """
    found = OnRecord()
    if max_staleness == 0:
        return found
    shards, oldest = _Shards(rollouts, ledger.shards()), state.version - max_staleness
    for index, rows in itertools.groupby(ledger.untaken(state), lambda row: row["idx"]):
        attempts = list(rows)
        if not all(_admitted(row, oldest, state.version) for row in attempts):
            continue
        damaged = [row for row in attempts if shards.is_damaged(row["shard"])]
        for row in damaged:
            found.damaged.setdefault(row["shard"], []).append(row["trajectory_id"])
        if not damaged:
            found.groups[index] = _group(attempts, shards)
    return found


def _admitted(row: Mapping[str, Any], oldest: int, newest: int) -> bool:
    if row["trained_reward"] is None or row["oldest_version"] is None:  # nothing of it is trained: of any version
        return True
    return bool(row["waiting"] and oldest <= row["oldest_version"] and row["newest_version"] <= newest)


class _Shards:
    """Shards that are read once each, when they are asked for."""

    def __init__(self, folder: Path, files: Mapping[str, WrittenFile]) -> None:
        self._folder, self._files = folder, files
        self._steps: dict[str, dict[str, list[Step]] | None] = {}

    def is_damaged(self, shard: str) -> bool:
        """Whether it is gone or not as it was written."""
        if shard not in self._steps:
            try:
                self._steps[shard] = read_shard(self._folder, self._files[shard])
            except DamageError:
                self._steps[shard] = None
        return self._steps[shard] is None

    def steps(self, shard: str, trajectory_id: str) -> list[Step]:
        """The steps of one trajectory, in call order; none of a damaged shard."""
        read = None if self.is_damaged(shard) else self._steps[shard]
        return (read or {}).get(trajectory_id, [])


def _group(rows: list[dict[str, Any]], shards: _Shards) -> Group:
    first = rows[0]
    task = Task(**json.loads(first["task"]))
    trajectories = tuple(_trajectory(row, task.task_id, shards) for row in rows)
    return Group(first["group_id"], first["idx"], first["epoch"], first["position"], task, trajectories)


def _trajectory(row: Mapping[str, Any], task_id: str, shards: _Shards) -> Trajectory:
    cause = row["failure_cause"]
    return Trajectory(
        trajectory_id=row["trajectory_id"],
        task_id=task_id,
        attempt=row["attempt"],
        steps=tuple(shards.steps(row["shard"], row["trajectory_id"])),
        reward=row["reward"],
        status=Status(row["status"]),
        failure=Failure(Cause(cause), row["failure_message"], row["failure_traceback"]) if cause else None,
        warning=row["warning"],
        seconds=row["seconds"],
        metrics=Measures.from_json(json.loads(row["metrics"])),
        dropped=reason_on_record(row["reward"], row["trained_reward"]),
        blocked_seconds=row["blocked_seconds"],
    )
