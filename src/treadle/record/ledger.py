"""The ledger: the state of every group, trajectory and step, and the latest checkpoint.

SQLite, one transaction per event. A step is `recorded` once its tokens are durable; a checkpoint's transaction marks
its contents as `trained` and makes it the latest. Both happen together or not at all. The table `files` has the SHA-256
of the run's other files.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treadle.core.errors import RunError
from treadle.core.files import WrittenFile, refusal, sha256_of, write_atomically
from treadle.core.outcomes import DroppedStep, as_played, as_trained, dropped_steps, outcome_when_recorded
from treadle.core.types import DropReason, Group, StepState, Trajectory
from treadle.record.image_files import name_of, referred
from treadle.record.ledger_reader import (
    OPEN_SHARD,
    SCHEMA_VERSION,
    UNTAKEN,
    LedgerReader,
    LoopState,
    manifest_name,
    trace_file,
)
from treadle.record.tables import SCHEMA, insert, journal_mode

AttemptKey = tuple[int, int, int]
"""Epoch, position and number of an attempt at a training task: with the seed, the key of its draws."""

_COPY, _COPY_BEFORE = "ledger.sqlite", "ledger-before.sqlite"  # recorded before the first replaces the second


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """Groups trained together. dropped_steps: steps left out. traces: file with traces of the others, if any."""

    dropped_steps: tuple[DroppedStep, ...]
    traces: WrittenFile | None = None


class Ledger(LedgerReader):
    """The ledger of a run trained by this process, its only writer. Thread-safe.

    copy: for readers, in the run directory, if the ledger itself is elsewhere (`run_store.open_ledger`).
    Raises RunError if the disk fails.
    """

    def __init__(self, path: Path, copy: Path | None = None) -> None:
        super().__init__(path, f"remove it: the run then continues with its copy {copy}" if copy else "")
        self._copy, self._lock = copy, threading.Lock()
        with self._errors("cannot be opened"), ExitStack() as on_failure:
            self._db = sqlite3.connect(path, check_same_thread=False)  # guarded by the lock
            on_failure.callback(self._db.close)
            if not self._db.execute("SELECT 1 FROM sqlite_schema").fetchone():
                self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT")
            self._check_version(self._db)
            self._db.execute(f"PRAGMA journal_mode={journal_mode(path)}")  # no effect if unsupported
            self._db.execute("PRAGMA synchronous=EXTRA")  # FULL, and as durable without WAL
            on_failure.pop_all()

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            yield self._db

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self._writing(), self._db:
            yield self._db

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock, self._errors("could not be written", "free disk space, then --resume"):
            yield

    def close(self) -> None:
        """Close it, when no other thread uses it, as a single file, readable on a read-only disk."""
        with self._lock:
            # It has a reader and stays in WAL mode.
            with suppress(sqlite3.Error):
                self._db.execute("PRAGMA journal_mode=DELETE")
            self._db.close()

    def record(self, groups: Sequence[Group], split: str, batch: int, shard: WrittenFile) -> None:
        """Record finished trajectories, some or all of each group; their tokens are already durable in `shard`.

        batch: the current policy version. Evaluated steps immediately get their terminal state, as do dropped ones and
        those of ungraded trajectories.
        """
        with self.transaction() as db:
            _note_file(db, f"rollouts/{shard.name}", shard.sha256)
            for group in groups:
                insert(db, "OR IGNORE INTO groups", [_group_row(group, split, batch)])
                for trajectory in group.everyone:
                    insert(db, "INTO trajectories", [_trajectory_row(group, trajectory, shard.name, split)])
                    insert(db, "INTO steps", _step_rows(trajectory, split))
                    if split == "train":
                        _forget_calls(db, (group.epoch, group.position, trajectory.attempt))

    def record_calls(self, calls: Sequence[Mapping[str, Any]], forgotten: Iterable[AttemptKey] = ()) -> None:
        """Record calls of attempts in progress, after removing those of the `forgotten` attempts.

        calls: rows of `open_calls`, without their SHA-256.

        They immediately outlive the process, but a crash of the machine only after the next other transaction, so that
        no call waits for the disk.
        """
        with self._unsynced() as db:
            for key in forgotten:
                _forget_calls(db, key)
            insert(db, "OR REPLACE INTO open_calls", [{**call, "sha256": sha256_of(call["tokens"])} for call in calls])

    @contextmanager
    def _unsynced(self) -> Iterator[sqlite3.Connection]:
        with self._writing():
            self._db.execute("PRAGMA synchronous=NORMAL")
            try:
                with self._db:
                    yield self._db
            finally:
                self._db.execute("PRAGMA synchronous=EXTRA")

    def record_open(self, group: Group, rows: Mapping[int, bytes]) -> None:
        """Record a trajectory that may continue, replacing its earlier record; as durable as `record_calls`.

        rows: new and changed steps by number (`rollout_store.packed_step`), kept in the ledger until `settle`.
        """
        [trajectory] = group.trajectories
        steps = [(trajectory.trajectory_id, number, row, sha256_of(row)) for number, row in rows.items()]
        with self._unsynced() as db:
            _note_file(db, f"rollouts/{OPEN_SHARD}", "")
            insert(db, "OR IGNORE INTO groups", [_group_row(group, "train", 0)])
            insert(db, "OR REPLACE INTO trajectories", [_trajectory_row(group, trajectory, OPEN_SHARD, "train")])
            insert(db, "OR REPLACE INTO steps", _step_rows(trajectory, "train"))
            db.executemany("INSERT OR REPLACE INTO open_steps VALUES (?, ?, ?, ?)", steps)

    def settle(self, shard: WrittenFile) -> None:
        """Record that all steps kept in the ledger are now durable in `shard`."""
        with self.transaction() as db:
            _note_file(db, f"rollouts/{shard.name}", shard.sha256)
            db.execute("UPDATE trajectories SET shard = ? WHERE shard = ?", (shard.name, OPEN_SHARD))
            db.execute("DELETE FROM open_steps")

    def keep_calls(self, first: Mapping[AttemptKey, int]) -> None:
        """Keep only the first calls of attempts in progress. first: number of the first call to drop, per attempt."""
        with self.transaction() as db:
            kept = json.dumps([(*key, count) for key, count in first.items()])
            epoch, position, attempt, count = (f"json_extract(value, '$[{n}]')" for n in range(4))
            which = f"{epoch} = epoch AND {position} = position AND {attempt} = attempt AND call < {count}"
            db.execute(f"DELETE FROM open_calls WHERE NOT EXISTS (SELECT 1 FROM json_each(?) WHERE {which})", (kept,))

    def note_files(self, files: Iterable[WrittenFile]) -> None:
        """Record the SHA-256 of files in the run directory, to be checked when they are read."""
        with self.transaction() as db:
            for file in files:
                _note_file(db, file.name, file.sha256)

    def note_trained(self, version: int, groups: Iterable[str], advantages: Mapping[str, float]) -> None:
        """Record the groups of an update. version: policy version before it. advantages: by trajectory_id."""
        with self.transaction() as db:
            db.executemany("UPDATE groups SET trained_version = ? WHERE group_id = ?", [(version, g) for g in groups])
            rows = [(advantage, trajectory) for trajectory, advantage in advantages.items()]
            db.executemany("UPDATE trajectories SET advantage = ? WHERE trajectory_id = ?", rows)

    def note_dropped(self, group: Group) -> None:
        """Record that the group, marked by `core.outcomes.leave_out`, will not be trained."""
        with self.transaction() as db:
            _drop_steps(db, dropped_steps([group]))

    def note_damaged(self, trajectories: Sequence[str]) -> int:
        """Record that these trajectories' tokens are lost; return the number of dropped steps."""
        which = "trajectory_id IN (SELECT value FROM json_each(?))"
        with self.transaction() as db:
            return _move_steps(db, StepState.DROPPED, DropReason.DAMAGED, which, json.dumps(trajectories))

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """Record why trajectories could not be trained. Their steps are dropped with the next checkpoint."""
        with self.transaction() as db:
            rows = [(message, trajectory) for trajectory, message in refused.items()]
            db.executemany("UPDATE trajectories SET warning = ? WHERE trajectory_id = ?", rows)

    def commit_checkpoint(
        self,
        directory: str,
        state: LoopState,
        batches: Sequence[TrainedBatch] = (),
        finished: bool = False,
        manifest_sha256: str | None = None,
    ) -> None:
        """Mark recorded steps of groups taken so far as trained, and this checkpoint as the latest, in one transaction.

        batches: since the previous checkpoint. finished: whether the run has ended, so that all other steps are unused.
        manifest_sha256: digest of its manifest, if a new one was written.
        """
        with self.transaction() as db:
            for batch in batches:
                _drop_steps(db, batch.dropped_steps)
                if batch.traces is not None:
                    _note_file(db, f"traces/{batch.traces.name}", batch.traces.sha256)
            _move_steps(db, StepState.TRAINED, None, _of_groups(f"NOT {UNTAKEN}"), *_place(state))
            if finished:
                _move_steps(db, StepState.DROPPED, DropReason.UNUSED, _of_groups("true"))
                db.execute("DELETE FROM open_calls")
            [number] = db.execute("SELECT coalesce(max(number), 0) + 1 FROM checkpoints").fetchone()
            row = {"update_number": state.update, "directory": directory, "state": json.dumps(asdict(state))}
            insert(db, "INTO checkpoints", [{"number": number, **row}])
            if manifest_sha256 is not None:
                _note_file(db, manifest_name(directory), manifest_sha256)

    def roll_back(self, state: LoopState, reason: DropReason, keep: Sequence[str] = ()) -> int:
        """Drop recorded steps missing in the resumed checkpoint, except those of groups to `keep`."""
        with self.transaction() as db:
            _forget_versions(db, state)
            which = f"{UNTAKEN} AND group_id NOT IN (SELECT value FROM json_each(?))"
            return _move_steps(db, StepState.DROPPED, reason, _of_groups(which), *_place(state), json.dumps(keep))

    def return_to(self, directory: str) -> int:
        """Make an earlier checkpoint the latest and roll back all after it; return the number of dropped steps."""
        state = self.checkpoint(directory)
        with self.transaction() as db:
            last = "SELECT max(number) FROM checkpoints WHERE directory = ?"
            db.execute(f"DELETE FROM checkpoints WHERE number > ({last})", (directory,))
            _forget_versions(db, state)
            versions = db.execute("SELECT DISTINCT trained_version FROM groups WHERE trained_version NOT NULL")
            kept = json.dumps([f"traces/{trace_file(version)}" for (version,) in versions])
            unused = "name GLOB 'traces/*' AND name NOT IN (SELECT value FROM json_each(?))"
            db.execute(f"DELETE FROM files WHERE {unused}", (kept,))
            return sum(
                _move_steps(
                    db, StepState.DROPPED, DropReason.ROLLED_BACK, _of_groups(UNTAKEN), *_place(state), moved=moved
                )
                for moved in (StepState.RECORDED, StepState.TRAINED)
            )

    def copy_out(self) -> None:
        """Update the copy for readers, if any. Raises RunError."""
        if self._copy is None:
            return
        temporary = self.path.with_name(f"{self.path.name}.copy")
        try:
            self.backup(temporary)
            content = temporary.read_bytes()
            temporary.unlink()
            before = self.file_sha256(_COPY)
            after = WrittenFile(_COPY, sha256_of(content))
            self.note_files([after] if before is None else [WrittenFile(_COPY_BEFORE, before), after])
            write_atomically(self._copy, content)
        except OSError as error:
            raise RunError(
                f"could not write {self._copy}: {refusal(error, 'make it writable')}, then --resume"
            ) from error

    def backup(self, path: Path) -> None:
        """Write the current ledger to a new single file, without WAL."""
        path.unlink(missing_ok=True)
        with self._reading() as db, closing(sqlite3.connect(path)) as copy:
            db.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")

    def has_copied(self, sha256: str) -> bool:
        return sha256 in (self.file_sha256(_COPY), self.file_sha256(_COPY_BEFORE))


def _place(state: LoopState) -> tuple[int, str]:
    return state.cursor, json.dumps(state.outstanding)


def _note_file(db: sqlite3.Connection, name: str, sha256: str) -> None:
    insert(db, "OR REPLACE INTO files", [{"name": name, "sha256": sha256}])


def _forget_calls(db: sqlite3.Connection, key: AttemptKey) -> None:
    db.execute("DELETE FROM open_calls WHERE epoch = ? AND position = ? AND attempt = ?", key)


def _forget_versions(db: sqlite3.Connection, state: LoopState) -> None:
    which = f"split = 'train' AND trained_version NOT NULL AND {UNTAKEN}"
    db.execute(f"UPDATE groups SET trained_version = NULL WHERE {which}", _place(state))


def _drop_steps(db: sqlite3.Connection, steps: Iterable[DroppedStep]) -> None:
    which = "trajectory_id = ? AND step = ? AND state = 'recorded'"
    rows = [(step.reason, step.trajectory_id, step.step) for step in steps]
    db.executemany(f"UPDATE steps SET state = 'dropped', reason = ? WHERE {which}", rows)


def _of_groups(which: str) -> str:
    """Return the condition on steps of training groups with the condition `which`."""
    joined = "trajectories JOIN groups USING (group_id)"
    return f"trajectory_id IN (SELECT trajectory_id FROM {joined} WHERE split = 'train' AND {which})"


def _move_steps(
    db: sqlite3.Connection,
    state: StepState,
    reason: DropReason | None,
    which: str,
    *values: object,
    moved: StepState = StepState.RECORDED,
) -> int:
    """Change the state of steps; return their number. which, values: condition. moved: present state."""
    sql = f"UPDATE steps SET state = ?, reason = ? WHERE state = ? AND {which}"
    return db.execute(sql, (state, reason, moved, *values)).rowcount


def _group_row(group: Group, split: str, batch: int) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "idx": group.index,
        "split": split,
        "epoch": group.epoch,
        "position": group.position,
        "batch": batch,
        "task": json.dumps(referred(asdict(group.task), name_of)),
    }


def _trajectory_row(group: Group, t: Trajectory, shard: str, split: str) -> dict[str, Any]:
    played, failure = as_played(t), t.failure
    return {
        "trajectory_id": t.trajectory_id,
        "group_id": group.group_id,
        "attempt": t.attempt,
        "status": t.status,
        "reward": t.reward,
        "failure_cause": failure.cause if failure else None,
        "failure_message": failure.message if failure else None,
        "warning": t.warning,
        "steps": len(t.steps),
        "completion_tokens": played.completion_tokens,
        "oldest_version": played.oldest_version,
        "newest_version": played.newest_version,
        "seconds": t.seconds,
        "shard": shard,
        "metrics": json.dumps(t.metrics.as_json()),
        "trained_reward": as_trained(t).reward if split == "train" else None,
        "components": json.dumps(played.components),
        "failure_traceback": failure.traceback if failure else None,
        "blocked_seconds": t.blocked_seconds,
        "start_source": t.start.source if t.start else None,
        "start_steps": t.start.steps if t.start else 0,
        "start_probability": t.start.probability if t.start else None,
    }


def _step_rows(t: Trajectory, split: str) -> list[dict[str, Any]]:
    return [
        {
            "trajectory_id": t.trajectory_id,
            "step": number,
            "state": outcome.state,
            "reason": outcome.reason,
            "prompt_tokens": step.prompt_tokens,
            "completion_tokens": step.completion_tokens,
            "stop_reason": step.stop_reason,
            "reward": step.reward,
        }
        for number, step in enumerate(t.steps)
        for outcome in [outcome_when_recorded(t, step, split)]
    ]
