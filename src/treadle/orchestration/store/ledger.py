"""The ledger: what happened to every group, trajectory and step, and which checkpoint is the latest.

SQLite, one transaction per event. A step is `recorded` once its tokens are durable; a checkpoint's transaction marks
what it contains as `trained` and makes it the latest. Both happen together or not at all.

Every row carries a checksum (`checked_database`), and the table `files` holds the SHA-256 of the run's other files.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treadle.core.errors import RunError
from treadle.core.files import WrittenFile, sha256_of, write_atomically
from treadle.core.manifest import MANIFEST
from treadle.core.outcomes import DroppedStep, as_played, as_trained, dropped_steps, outcome_when_recorded
from treadle.core.types import DropReason, Group, StepState, Trajectory
from treadle.orchestration.store.checked_database import CheckedDatabase

_SCHEMA = """
CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, idx INTEGER NOT NULL, split TEXT NOT NULL, epoch INTEGER NOT NULL,
  position INTEGER NOT NULL, batch INTEGER NOT NULL, task TEXT NOT NULL, trained_version INTEGER,
  checksum INTEGER);
CREATE TABLE trajectories (
  trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups, attempt INTEGER NOT NULL,
  status TEXT NOT NULL, reward REAL, advantage REAL, failure_cause TEXT, failure_message TEXT, warning TEXT NOT NULL,
  steps INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, oldest_version INTEGER, newest_version INTEGER,
  seconds REAL NOT NULL, shard TEXT NOT NULL, metrics TEXT NOT NULL,
  trained_reward REAL, components TEXT NOT NULL, failure_traceback TEXT, blocked_seconds REAL NOT NULL,
  checksum INTEGER);
CREATE TABLE steps (
  trajectory_id TEXT NOT NULL REFERENCES trajectories, step INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT,
  prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, stop_reason TEXT NOT NULL, reward REAL NOT NULL,
  checksum INTEGER, PRIMARY KEY (trajectory_id, step)) WITHOUT ROWID;
CREATE TABLE checkpoints (
  number INTEGER PRIMARY KEY, update_number INTEGER NOT NULL, directory TEXT NOT NULL,
  state TEXT NOT NULL, checksum INTEGER);
CREATE TABLE files (name TEXT PRIMARY KEY, sha256 TEXT NOT NULL, checksum INTEGER);
CREATE INDEX groups_idx ON groups (split, idx);
CREATE INDEX trajectories_group ON trajectories (group_id);
"""


def salvage(run: Path) -> str:
    """Return what can be done about a run whose ledger cannot be used, for an error message."""
    checkpoints = sorted(path for path in (run / "checkpoints").glob("step-*") if path.is_dir())
    if not checkpoints:
        return "restore it from a copy, or start a new run"
    return (
        f"restore it from a copy, or start a new run from a checkpoint: model.path={checkpoints[-1]} model.build=null"
    )


def no_checkpoint(run: Path) -> str:
    """Return that the run has no checkpoint, for an error message; and what to do if it has unrecorded directories."""
    if any((run / "checkpoints").glob("step-*")):
        return f"has no checkpoint on record, only directories; {salvage(run)}"
    return "has no checkpoint yet: there is nothing to resume"


_COPY, _COPY_BEFORE = "ledger.sqlite", "ledger-before.sqlite"  # on record before the first replaces the second
_TRACE_FILE = "v%06d.parquet"  # of a version
_UNTAKEN = "g.idx >= ? OR g.idx IN (SELECT value FROM json_each(?))"  # cursor, outstanding


@dataclass(frozen=True, slots=True)
class LoopState:
    """Holds where the loop stands: all that resuming needs, with the weights and the optimizer.

    cursor: groups started so far, in submission order; outstanding: those of them that were not taken for training.
    evaluations: held-out results so far, for the summary. failed_tasks: task_id -> groups in a row with too few
    graded attempts. began: when the run did, in ISO format: the date that templates write.
    """

    update: int = 0
    version: int = 0
    cursor: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    evaluations: tuple[dict[str, Any], ...] = ()
    outstanding: tuple[int, ...] = ()
    failed_tasks: Mapping[str, int] = field(default_factory=dict)
    began: str = ""


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """Holds what a checkpoint makes final of groups that were trained together.

    dropped_steps: those of their steps that were not trained. traces: the file with their traces, if any is traced.
    """

    dropped_steps: tuple[DroppedStep, ...]
    traces: WrittenFile | None = None


class Ledger:
    """Keeps the durable record of one run. `read_only` for reading a run that may be in progress.

    copy: the file in the run directory that readers find, where the ledger itself is elsewhere (`local_ledger`).
    All methods raise DamageError for a row that is not as it was written.
    """

    def __init__(self, path: Path, read_only: bool = False, copy: Path | None = None) -> None:
        if read_only and not path.is_file():
            raise RunError(f"no ledger at {path}; is {path.parent} a run directory?")
        remedy = salvage(path.parent) if copy is None else f"remove it: the run then goes on with its copy {copy}"
        self._copy, self._db = copy, CheckedDatabase(path, _SCHEMA, remedy, read_only)

    # --- writing -------------------------------------------------------------------------------------------------

    def record(self, groups: Sequence[Group], split: str, batch: int, shard: WrittenFile) -> None:
        """Record finished trajectories whose tokens are already durable in `shard`; of a group, some or all.

        batch: the current policy version. Evaluated steps are in their terminal state at once, and so are dropped
        ones and those of ungraded trajectories.
        """
        with self._db.transaction() as db:
            _insert(db, "OR REPLACE INTO files", [{"name": f"rollouts/{shard.name}", "sha256": shard.sha256}])
            for group in groups:
                _insert(db, "OR IGNORE INTO groups", [_group_row(group, split, batch)])
                for trajectory in group.trajectories:
                    _insert(db, "INTO trajectories", [_trajectory_row(group, trajectory, shard.name, split)])
                    _insert(db, "INTO steps", _step_rows(trajectory, split))

    def note_files(self, written: Iterable[WrittenFile]) -> None:
        """Record the SHA-256 of files of the run, by their names in its directory; it is checked when they are read."""
        with self._db.transaction() as db:
            _insert(db, "OR REPLACE INTO files", (file._asdict() for file in written))

    def note_trained(self, version: int, groups: Iterable[str], advantages: Mapping[str, float]) -> None:
        """Record which groups an update was made of, until a resumed run rolls it back.

        version: of the policy before. advantages: trajectory_id -> advantage.
        """
        with self._db.transaction() as db:
            db.executemany(
                "UPDATE groups SET trained_version = ? WHERE group_id = ?", [(version, group) for group in groups]
            )
            db.executemany(
                "UPDATE trajectories SET advantage = ? WHERE trajectory_id = ?",
                [(a, t) for t, a in advantages.items()],
            )

    def note_dropped(self, group: Group) -> None:
        """Record that the group will not be trained; `core.outcomes.leave_out` has marked its trajectories."""
        with self._db.transaction() as db:
            self._drop_steps(db, dropped_steps([group]))

    def note_damaged(self, trajectories: Sequence[str]) -> int:
        """Record that these trajectories' tokens are lost; returns how many steps will not be trained for that."""
        with self._db.transaction() as db:
            return db.executemany(
                "UPDATE steps SET state = ?, reason = ? WHERE trajectory_id = ? AND state = ?",
                [(StepState.DROPPED, DropReason.DAMAGED, name, StepState.RECORDED) for name in trajectories],
            ).rowcount

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """Record why trajectories could not be trained: trajectory_id -> why.

        Their steps are dropped with the next checkpoint.
        """
        with self._db.transaction() as db:
            db.executemany(
                "UPDATE trajectories SET warning = ? WHERE trajectory_id = ?",
                [(message, trajectory) for trajectory, message in refused.items()],
            )

    def commit_checkpoint(
        self,
        directory: str,
        state: LoopState,
        batches: Sequence[TrainedBatch] = (),
        finished: bool = False,
        manifest_sha256: str | None = None,
    ) -> None:
        """Mark recorded steps of groups taken so far as trained and this checkpoint as the latest, in one transaction.

        batches: those since the checkpoint before. finished: nothing will be trained any more, so that the steps that
        are left are unused. manifest_sha256: of its directory, if a new one was written.
        """
        with self._db.transaction() as db:
            for batch in batches:
                self._drop_steps(db, batch.dropped_steps)
                if batch.traces is not None:
                    file = {"name": f"traces/{batch.traces.name}", "sha256": batch.traces.sha256}
                    _insert(db, "OR REPLACE INTO files", [file])
            which = "g.idx < ? AND g.idx NOT IN (SELECT value FROM json_each(?))"
            self._move_steps(db, StepState.TRAINED, None, which, state.cursor, json.dumps(state.outstanding))
            if finished:
                self._move_steps(db, StepState.DROPPED, DropReason.UNUSED, "true")
            row = {"update_number": state.update, "directory": directory, "state": json.dumps(asdict(state))}
            _insert(db, "INTO checkpoints", [row])
            if manifest_sha256 is not None:
                manifest = {"name": _manifest_name(directory), "sha256": manifest_sha256}
                _insert(db, "OR REPLACE INTO files", [manifest])

    def roll_back(self, state: LoopState, reason: DropReason, keep: Sequence[str] = ()) -> int:
        """Drop recorded steps that are not in the checkpoint that is resumed from, but for the groups to `keep`.

        Returns how many steps that were. Their groups stay on record under their own ids.
        """
        with self._db.transaction() as db:
            self._forget_versions(db, state)
            which = f"({_UNTAKEN}) AND g.group_id NOT IN (SELECT value FROM json_each(?))"
            outstanding = json.dumps(state.outstanding)
            return self._move_steps(
                db, StepState.DROPPED, reason, which, state.cursor, outstanding, json.dumps(list(keep))
            )

    def return_to(self, directory: str) -> int:
        """Make an earlier checkpoint the latest and roll back all that came after it, in one transaction.

        Returns how many steps are dropped, trained ones among them.
        """
        state = self.checkpoint(directory)
        with self._db.transaction() as db:
            last = "SELECT max(number) FROM checkpoints WHERE directory = ?"
            db.execute(f"DELETE FROM checkpoints WHERE number > ({last})", (directory,))
            where = (_UNTAKEN, state.cursor, json.dumps(state.outstanding))
            self._forget_versions(db, state)
            trained = (
                f"SELECT printf('traces/{_TRACE_FILE}', trained_version) FROM groups WHERE trained_version NOT NULL"
            )
            db.execute(f"DELETE FROM files WHERE name GLOB 'traces/*' AND name NOT IN ({trained})")
            return sum(
                self._move_steps(db, StepState.DROPPED, DropReason.ROLLED_BACK, *where, moved=moved)
                for moved in (StepState.RECORDED, StepState.TRAINED)
            )

    def _forget_versions(self, db: sqlite3.Connection, state: LoopState) -> None:
        """Forget which version trained groups that are not in this checkpoint."""
        which = f"UPDATE groups AS g SET trained_version = NULL WHERE split = 'train' AND ({_UNTAKEN})"
        db.execute(which, (state.cursor, json.dumps(state.outstanding)))

    def _drop_steps(self, db: sqlite3.Connection, steps: Iterable[DroppedStep]) -> None:
        """Drop those of the steps that are in no terminal state yet."""
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
        """Return (directory name, state) of the latest checkpoint, or None before the first."""
        rows = self.query("SELECT directory, state FROM checkpoints ORDER BY number DESC LIMIT 1")
        return (rows[0]["directory"], _loop_state(rows[0]["state"])) if rows else None

    def checkpoint(self, directory: str) -> LoopState:
        """Return the state of a checkpoint. Raises RunError if it was not committed, or was rolled back."""
        rows = self.query("SELECT state FROM checkpoints WHERE directory = ? ORDER BY number DESC LIMIT 1", directory)
        if not rows:
            raise RunError(f"the ledger knows no checkpoint {directory!r}; resume from another one")
        return _loop_state(rows[0]["state"])

    def checkpoint_names(self) -> set[str]:
        """Return the directory names of all checkpoints that were committed and not rolled back."""
        return {row["directory"] for row in self.query("SELECT directory FROM checkpoints")}

    def untaken(self, state: LoopState) -> list[dict[str, Any]]:
        """Return rows of the trajectories on record that are not in the checkpoint, in order of groups.

        Of a group that was sampled several times it is the newest sample. waiting: steps that may still be trained.
        """
        return self.query(
            "SELECT g.*, t.*, (SELECT count(*) FROM steps s WHERE s.trajectory_id = t.trajectory_id AND s.state = "
            f"'recorded') AS waiting FROM trajectories t JOIN groups g USING (group_id) WHERE split = 'train' AND "
            f"({_UNTAKEN}) AND g.rowid = (SELECT max(rowid) FROM groups h WHERE h.split = 'train' AND h.idx = g.idx) "
            "ORDER BY g.idx, t.attempt",
            state.cursor,
            json.dumps(state.outstanding),
        )

    def shards(self) -> dict[str, WrittenFile]:
        """Return the files that hold the tokens of all trajectories on record, by their names in `rollouts/`."""
        return self._files_in("rollouts/")

    def traces(self) -> dict[str, WrittenFile]:
        """Return the files that hold the traces of trained groups, by their names in `traces/` (`trace_file`)."""
        return self._files_in("traces/")

    def _files_in(self, folder: str) -> dict[str, WrittenFile]:
        rows = self.query("SELECT name, sha256 FROM files WHERE name GLOB ?", f"{folder}*")
        files = (WrittenFile(row["name"].removeprefix(folder), row["sha256"]) for row in rows)
        return {file.name: file for file in files}

    def manifest_sha256(self, directory: str) -> str | None:
        """Return the SHA-256 of the manifest of the checkpoint in this directory, as it was written last."""
        return self.file_sha256(_manifest_name(directory))

    def file_sha256(self, name: str) -> str | None:
        """Return the SHA-256 of a file, by its name in the run's directory; None if it is not on record."""
        rows = self.query("SELECT sha256 FROM files WHERE name = ?", name)
        return rows[0]["sha256"] if rows else None

    def times_sampled(self) -> dict[int, int]:
        """Return group index -> how often it is on record; a resumed run gives the next sample another id."""
        rows = self.query("SELECT idx, count(*) AS times FROM groups WHERE split = 'train' GROUP BY idx")
        return {row["idx"]: row["times"] for row in rows}

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Return the rows of a SELECT, as dicts."""
        return self._db.query(sql, *values)

    def prove(self) -> None:
        """Raise DamageError unless the whole ledger is as it was written."""
        self._db.prove()

    def copy_out(self) -> None:
        """Replace the copy for readers, if there is one, by the ledger as it is now. Raises RunError."""
        if self._copy is None:
            return
        made = self._db.path.with_name(f"{self._db.path.name}.copy")
        try:
            self._db.backup(made)
            content = made.read_bytes()
            made.unlink()
            before = self.file_sha256(_COPY)
            after = WrittenFile(_COPY, sha256_of(content))
            self.note_files([after] if before is None else [WrittenFile(_COPY_BEFORE, before), after])
            write_atomically(self._copy, content)
        except OSError as error:
            raise RunError(
                f"could not copy the ledger to {self._copy}: {error}; free disk space, then --resume"
            ) from error

    def has_copied(self, sha256: str) -> bool:
        """Return whether the copy of this digest is the last one that was made: no other process made one since."""
        return sha256 in (self.file_sha256(_COPY), self.file_sha256(_COPY_BEFORE))

    def close(self) -> None:
        self._db.close()


def trace_file(version: int) -> str:
    """Return the name in `traces/` of the file with the traces of groups of this `trained_version`."""
    return _TRACE_FILE % version


def _manifest_name(directory: str) -> str:
    return f"checkpoints/{directory}/{MANIFEST}"


def _loop_state(text: str) -> LoopState:
    state = json.loads(text)
    for name in ("evaluations", "outstanding"):
        state[name] = tuple(state.get(name, getattr(LoopState(), name)))
    return LoopState(**state)


def _insert(db: sqlite3.Connection, into: str, rows: Iterable[dict[str, Any]]) -> None:
    """Insert rows by the names of their columns: `_insert(db, "INTO files", [{"name": "a", "sha256": "b"}])`."""
    for row in rows:
        names, values = ", ".join(row), ", ".join(f":{name}" for name in row)
        db.execute(f"INSERT {into} ({names}) VALUES ({values})", row)


def _group_row(group: Group, split: str, batch: int) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "idx": group.index,
        "split": split,
        "epoch": group.epoch,
        "position": group.position,
        "batch": batch,
        "task": json.dumps(asdict(group.task)),
    }


def _trajectory_row(group: Group, t: Trajectory, shard: str, split: str) -> dict[str, Any]:
    happened = as_played(t)
    return {
        "trajectory_id": t.trajectory_id,
        "group_id": group.group_id,
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
        "failure_traceback": t.failure.traceback if t.failure else None,
        "blocked_seconds": t.blocked_seconds,
    }


def _step_rows(t: Trajectory, split: str) -> Iterator[dict[str, Any]]:
    for number, step in enumerate(t.steps):
        outcome = outcome_when_recorded(t, step, split)
        yield {
            "trajectory_id": t.trajectory_id,
            "step": number,
            "state": outcome.state,
            "reason": outcome.reason,
            "prompt_tokens": len(step.prompt_ids),
            "completion_tokens": len(step.completion_ids),
            "stop_reason": step.stop_reason,
            "reward": step.reward,
        }
