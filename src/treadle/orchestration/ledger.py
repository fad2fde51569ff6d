"""The ledger: what happened to every group, trajectory and step, and which checkpoint is the latest.

SQLite, one transaction per event. A step is `recorded` once its tokens are durable; a checkpoint's transaction marks
what it contains as `trained` and makes it the latest. Both happen together or not at all.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treadle.core.errors import RunError
from treadle.core.outcomes import DroppedStep, as_played, as_trained, dropped_steps, outcome_when_recorded
from treadle.core.types import DropReason, Group, StepState, Trajectory

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
  group_id TEXT PRIMARY KEY, idx INTEGER NOT NULL, split TEXT NOT NULL, epoch INTEGER NOT NULL,
  position INTEGER NOT NULL, batch INTEGER NOT NULL, task TEXT NOT NULL, trained_version INTEGER);
CREATE TABLE IF NOT EXISTS trajectories (
  trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups, attempt INTEGER NOT NULL,
  status TEXT NOT NULL, reward REAL, advantage REAL, failure_cause TEXT, failure_message TEXT, warning TEXT NOT NULL,
  steps INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, oldest_version INTEGER, newest_version INTEGER,
  seconds REAL NOT NULL, shard TEXT NOT NULL, metrics TEXT NOT NULL,
  trained_reward REAL, components TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps (
  trajectory_id TEXT NOT NULL REFERENCES trajectories, step INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT,
  prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, stop_reason TEXT NOT NULL, reward REAL NOT NULL,
  PRIMARY KEY (trajectory_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS checkpoints (
  number INTEGER PRIMARY KEY AUTOINCREMENT, update_number INTEGER NOT NULL, directory TEXT NOT NULL,
  state TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS groups_idx ON groups (split, idx);
CREATE INDEX IF NOT EXISTS trajectories_group ON trajectories (group_id);
"""


_UNTAKEN = "g.idx >= ? OR g.idx IN (SELECT value FROM json_each(?))"  # cursor, outstanding


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where the loop stands; with the weights and the optimizer all that resuming needs.

    cursor: groups started so far, in submission order; outstanding: those of them that were not taken for training.
    evaluations: held-out results so far, for the summary. failed_tasks: task_id -> groups in a row with too few
    graded attempts.
    """

    update: int = 0
    version: int = 0
    cursor: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    evaluations: tuple[dict[str, Any], ...] = ()
    outstanding: tuple[int, ...] = ()
    failed_tasks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """Groups that were trained together.

    version: of the policy that was updated, so that staleness is this less a token's own. groups: their ids.
    dropped_steps: those of them that were not trained.
    """

    version: int
    groups: tuple[str, ...]
    dropped_steps: tuple[DroppedStep, ...]


class Ledger:
    """The durable record of one run. `read_only` for looking at a run that may be in progress."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        if read_only and not path.is_file():
            raise RunError(f"no ledger at {path}; is {path.parent} a run directory?")
        try:
            name = f"{path.resolve().as_uri()}?mode=ro" if read_only else path
            self._db = sqlite3.connect(name, uri=read_only, check_same_thread=False)  # the lock sees to that
            self._lock = threading.Lock()
            self._db.row_factory = sqlite3.Row
            if not read_only:
                self._db.execute(f"PRAGMA journal_mode={journal_mode(path)}")  # without effect where it cannot be had
                self._db.execute("PRAGMA synchronous=EXTRA")  # FULL, and as durable without WAL
                self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise RunError(f"cannot open the ledger {path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit on leaving, roll back on any error. Raises RunError where the disk fails."""
        try:
            with self._lock, self._db:
                yield self._db
        except sqlite3.OperationalError as error:
            raise RunError(f"the ledger could not be written: {error}; free disk space, then --resume") from error

    # --- writing -------------------------------------------------------------------------------------------------

    def record(self, groups: Sequence[Group], split: str, batch: int, shard: str) -> None:
        """Note finished trajectories whose tokens are already durable in `shard`; of a group, some or all.

        batch: the policy version of the moment. Evaluated steps are in their terminal state at once, and so are dropped
        ones and those of ungraded trajectories.
        """
        with self._transaction() as db:
            for group in groups:
                row = (
                    group.group_id,
                    group.index,
                    split,
                    group.epoch,
                    group.position,
                    batch,
                    json.dumps(asdict(group.task)),
                )
                db.execute("INSERT OR IGNORE INTO groups VALUES (?,?,?,?,?,?,?,NULL)", row)
                for trajectory in group.trajectories:
                    fields = _trajectory_row(group.group_id, trajectory, shard, split)
                    names, values = ", ".join(fields), ", ".join(f":{name}" for name in fields)
                    db.execute(f"INSERT INTO trajectories ({names}) VALUES ({values})", fields)
                db.executemany(
                    "INSERT INTO steps VALUES (?,?,?,?,?,?,?,?)",
                    [row for t in group.trajectories for row in _step_rows(t, split)],
                )

    def note_advantages(self, advantages: Mapping[str, float]) -> None:
        """trajectory_id -> advantage it was trained with."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE trajectories SET advantage = ? WHERE trajectory_id = ?",
                [(a, t) for t, a in advantages.items()],
            )

    def note_dropped(self, group: Group) -> None:
        """Record that the group will not be trained, as `leave_out` has marked it."""
        with self._transaction() as db:
            self._drop_steps(db, dropped_steps([group]))

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """trajectory_id -> why the learner could not train it. Its steps are dropped with the next checkpoint."""
        with self._transaction() as db:
            db.executemany(
                "UPDATE trajectories SET warning = ? WHERE trajectory_id = ?",
                [(message, trajectory) for trajectory, message in refused.items()],
            )

    def commit_checkpoint(
        self, directory: str, state: LoopState, batches: Sequence[TrainedBatch] = (), finished: bool = False
    ) -> None:
        """One transaction: recorded steps of groups taken so far are trained, and this checkpoint is the latest.

        batches: those since the checkpoint before. finished: nothing will be trained any more, so that whatever is
        left is unused.
        """
        with self._transaction() as db:
            for batch in batches:
                db.executemany(
                    "UPDATE groups SET trained_version = ? WHERE group_id = ?",
                    [(batch.version, group) for group in batch.groups],
                )
                self._drop_steps(db, batch.dropped_steps)
            which = "g.idx < ? AND g.idx NOT IN (SELECT value FROM json_each(?))"
            self._move_steps(db, StepState.TRAINED, None, which, state.cursor, json.dumps(state.outstanding))
            if finished:
                self._move_steps(db, StepState.DROPPED, DropReason.UNUSED, "true")
            db.execute(
                "INSERT INTO checkpoints (update_number, directory, state) VALUES (?,?,?)",
                (state.update, directory, json.dumps(asdict(state))),
            )

    def roll_back(self, state: LoopState, reason: DropReason, keep: Sequence[str] = ()) -> int:
        """Drop what was recorded and is not in the checkpoint that is resumed from, but for the groups to `keep`.

        Returns how many steps that were. Their groups stay on record under their own names.
        """
        with self._transaction() as db:
            which = f"({_UNTAKEN}) AND g.group_id NOT IN (SELECT value FROM json_each(?))"
            outstanding = json.dumps(state.outstanding)
            return self._move_steps(
                db, StepState.DROPPED, reason, which, state.cursor, outstanding, json.dumps(list(keep))
            )

    def return_to(self, directory: str) -> int:
        """One transaction: this checkpoint is the latest again, and all that came after it is rolled back.

        Returns how many steps that were, trained ones among them.
        """
        state = self.checkpoint(directory)
        with self._transaction() as db:
            last = "SELECT max(number) FROM checkpoints WHERE directory = ?"
            db.execute(f"DELETE FROM checkpoints WHERE number > ({last})", (directory,))
            where = (_UNTAKEN, state.cursor, json.dumps(state.outstanding))
            which = f"UPDATE groups AS g SET trained_version = NULL WHERE split = 'train' AND ({_UNTAKEN})"
            db.execute(which, where[1:])
            return sum(
                self._move_steps(db, StepState.DROPPED, DropReason.ROLLED_BACK, *where, moved=moved)
                for moved in (StepState.RECORDED, StepState.TRAINED)
            )

    def _drop_steps(self, db: sqlite3.Connection, steps: Iterable[DroppedStep]) -> None:
        """Those that are in no terminal state yet."""
        db.executemany(
            "UPDATE steps SET state = ?, reason = ? WHERE trajectory_id = ? AND step = ? AND state = ?",
            [(StepState.DROPPED, s.reason, s.trajectory_id, s.step, StepState.RECORDED) for s in steps],
        )

    def _move_steps(
        self,
        db: sqlite3.Connection,
        state: StepState,
        reason: str | None,
        which: str,
        *values: object,
        moved: StepState = StepState.RECORDED,
    ) -> int:
        done = db.execute(
            "UPDATE steps SET state = ?, reason = ? WHERE state = ? AND trajectory_id IN (SELECT t.trajectory_id FROM "
            f"trajectories t JOIN groups g USING (group_id) WHERE g.split = 'train' AND ({which}))",
            (state, reason, moved, *values),
        )
        return done.rowcount

    # --- reading -------------------------------------------------------------------------------------------------

    def latest_checkpoint(self) -> tuple[str, LoopState] | None:
        """(directory name, state), or None before the first checkpoint."""
        rows = self.query("SELECT directory, state FROM checkpoints ORDER BY number DESC LIMIT 1")
        return (rows[0]["directory"], _loop_state(rows[0]["state"])) if rows else None

    def checkpoint(self, directory: str) -> LoopState:
        """The state of a checkpoint. Raises RunError if no such one was committed, or it was rolled back."""
        rows = self.query("SELECT state FROM checkpoints WHERE directory = ? ORDER BY number DESC LIMIT 1", directory)
        if not rows:
            raise RunError(f"the ledger knows no checkpoint {directory!r}; resume from another one")
        return _loop_state(rows[0]["state"])

    def checkpoint_names(self) -> set[str]:
        """Directories of all checkpoints that were committed and not rolled back."""
        return {row["directory"] for row in self.query("SELECT directory FROM checkpoints")}

    def untaken(self, state: LoopState) -> list[dict[str, Any]]:
        """Trajectories on record that are not in the checkpoint, of each group its newest name; in order of groups.

        waiting: steps of it that may still be trained.
        """
        return self.query(
            "SELECT g.*, t.*, (SELECT count(*) FROM steps s WHERE s.trajectory_id = t.trajectory_id AND s.state = "
            f"'recorded') AS waiting FROM trajectories t JOIN groups g USING (group_id) WHERE split = 'train' AND "
            f"({_UNTAKEN}) AND g.rowid = (SELECT max(rowid) FROM groups h WHERE h.split = 'train' AND h.idx = g.idx) "
            "ORDER BY g.idx, t.attempt",
            state.cursor,
            json.dumps(state.outstanding),
        )

    def shards(self) -> set[str]:
        """Files that hold the tokens of what is on record."""
        return {row["shard"] for row in self.query("SELECT DISTINCT shard FROM trajectories")}

    def times_sampled(self) -> dict[int, int]:
        """Group index -> how often it is on record; a resumed run names the next sample apart."""
        rows = self.query("SELECT idx, count(*) AS times FROM groups WHERE split = 'train' GROUP BY idx")
        return {row["idx"]: row["times"] for row in rows}

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Rows of a SELECT, as dicts."""
        with self._lock, closing(self._db.execute(sql, values)) as cursor:
            return [dict(row) for row in cursor]

    def close(self) -> None:
        """Close the database."""
        self._db.close()


_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}


def journal_mode(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """WAL, so that who reads a run never holds it up; DELETE on network filesystems and FUSE, where WAL does not work.

    mounts: the system's table of them; where there is none, WAL.
    """
    if not mounts.is_file():
        return "WAL"
    rows = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    kinds = {Path(row[1].replace("\\040", " ")): row[2] for row in rows}  # of two on one point the later is on top
    kind = next((kinds[folder] for folder in path.resolve().parents if folder in kinds), "")
    return "DELETE" if kind in _NETWORK or kind.startswith("fuse") else "WAL"


def _loop_state(text: str) -> LoopState:
    state = json.loads(text)
    for name in ("evaluations", "outstanding"):
        state[name] = tuple(state[name])
    return LoopState(**state)


def _trajectory_row(group_id: str, t: Trajectory, shard: str, split: str) -> dict[str, Any]:
    happened = as_played(t)
    return {
        "trajectory_id": t.trajectory_id,
        "group_id": group_id,
        "attempt": t.attempt,
        "status": t.status,
        "reward": t.reward,
        "failure_cause": t.failure.cause if t.failure else None,
        "failure_message": t.failure.message if t.failure else None,
        "warning": t.warning,
        "steps": len(t.steps),
        "completion_tokens": happened.completion_tokens,
        "oldest_version": happened.oldest_version,
        "newest_version": happened.newest_version,
        "seconds": t.seconds,
        "shard": shard,
        "metrics": json.dumps(t.metrics.as_json()),
        "trained_reward": as_trained(t).reward if split == "train" else None,
        "components": json.dumps(happened.components),
    }


def _step_rows(t: Trajectory, split: str) -> Iterator[tuple[Any, ...]]:
    for number, step in enumerate(t.steps):
        lengths = (len(step.prompt_ids), len(step.completion_ids))
        outcome = outcome_when_recorded(t, step, split)
        yield (t.trajectory_id, number, *outcome, *lengths, step.stop_reason, step.reward)
