"""The ledger: what happened to every group, trajectory and step, and which checkpoint is the latest.

SQLite, one transaction per event. A step is `recorded` once its tokens are durable; a checkpoint's transaction marks
what it contains as `trained` and makes it the latest. Both happen together or not at all.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treadle.core.errors import RunError
from treadle.core.types import DropReason, Group, StepState, Trajectory

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
  group_id TEXT PRIMARY KEY, idx INTEGER NOT NULL, split TEXT NOT NULL, epoch INTEGER NOT NULL,
  position INTEGER NOT NULL, batch INTEGER NOT NULL, task TEXT NOT NULL, shard TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories (
  trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups, attempt INTEGER NOT NULL,
  status TEXT NOT NULL, reward REAL, advantage REAL, failure_cause TEXT, failure_message TEXT, warning TEXT NOT NULL,
  steps INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, oldest_version INTEGER, seconds REAL NOT NULL,
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


@dataclass(frozen=True, slots=True)
class LoopState:
    """Where the loop stands; with the weights and the optimizer all that resuming needs.

    cursor: groups consumed so far, in submission order. evaluations: held-out results so far, for the summary.
    """

    update: int = 0
    version: int = 0
    cursor: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    evaluations: tuple[dict[str, Any], ...] = ()


class Ledger:
    """The durable record of one run. `read_only` for looking at a run that may be in progress."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        if read_only and not path.is_file():
            raise RunError(f"no ledger at {path}; is {path.parent} a run directory?")
        try:
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro" if read_only else path, uri=read_only)
            self._db.row_factory = sqlite3.Row
            if not read_only:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise RunError(f"cannot open the ledger {path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit on leaving, roll back on any error. Raises RunError where the disk fails."""
        try:
            with self._db:
                yield self._db
        except sqlite3.OperationalError as error:
            raise RunError(f"the ledger could not be written: {error}; free disk space, then --resume") from error

    # --- writing -------------------------------------------------------------------------------------------------

    def record(self, groups: Sequence[Group], split: str, batch: int, shard: str) -> None:
        """Note finished groups whose tokens are already durable in `shard`.

        Evaluated steps are in their terminal state at once, and so are dropped ones and those of ungraded trajectories.
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
                    shard,
                )
                db.execute("INSERT INTO groups VALUES (?,?,?,?,?,?,?,?)", row)
                db.executemany(
                    "INSERT INTO trajectories VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                    [_trajectory_row(group.group_id, t, split) for t in group.trajectories],
                )
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

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """trajectory_id -> why the learner could not train it; its steps are dropped."""
        with self._transaction() as db:
            for trajectory, message in refused.items():
                db.execute(
                    "UPDATE steps SET state = ?, reason = ? WHERE trajectory_id = ?",
                    (StepState.DROPPED, DropReason.REFUSED, trajectory),
                )
                db.execute("UPDATE trajectories SET warning = ? WHERE trajectory_id = ?", (message, trajectory))

    def commit_checkpoint(self, directory: str, state: LoopState) -> None:
        """One transaction: the recorded steps before the cursor are trained, and this checkpoint is the latest."""
        with self._transaction() as db:
            self._move_steps(db, StepState.TRAINED, None, "g.idx < ?", state.cursor)
            db.execute(
                "INSERT INTO checkpoints (update_number, directory, state) VALUES (?,?,?)",
                (state.update, directory, json.dumps(asdict(state))),
            )

    def roll_back(self, state: LoopState) -> int:
        """Drop what was recorded after the checkpoint that is resumed from; it will be sampled again.

        Returns how many steps that were. Their groups stay on record under their own names.
        """
        with self._transaction() as db:
            return self._move_steps(db, StepState.DROPPED, DropReason.RESAMPLED, "g.idx >= ?", state.cursor)

    def _move_steps(self, db: sqlite3.Connection, state: StepState, reason: str | None, which: str, value: int) -> int:
        moved = db.execute(
            "UPDATE steps SET state = ?, reason = ? WHERE state = ? AND trajectory_id IN (SELECT t.trajectory_id FROM "
            f"trajectories t JOIN groups g USING (group_id) WHERE g.split = 'train' AND {which})",
            (state, reason, StepState.RECORDED, value),
        )
        return moved.rowcount

    # --- reading -------------------------------------------------------------------------------------------------

    def latest_checkpoint(self) -> tuple[str, LoopState] | None:
        """(directory name, state), or None before the first checkpoint."""
        row = self._db.execute("SELECT directory, state FROM checkpoints ORDER BY number DESC LIMIT 1").fetchone()
        if row is None:
            return None
        state = json.loads(row["state"])
        return row["directory"], LoopState(**{**state, "evaluations": tuple(state["evaluations"])})

    def times_sampled(self) -> dict[int, int]:
        """Group index -> how often it is on record; a resumed run names the next sample apart."""
        rows = self._db.execute("SELECT idx, count(*) FROM groups WHERE split = 'train' GROUP BY idx")
        return dict(tuple(row) for row in rows)

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Rows of a SELECT, as dicts."""
        with closing(self._db.execute(sql, values)) as cursor:
            return [dict(row) for row in cursor]

    def close(self) -> None:
        """Close the database."""
        self._db.close()


def _trajectory_row(group_id: str, t: Trajectory, split: str) -> tuple[Any, ...]:
    cause, message = (t.failure.cause, t.failure.message) if t.failure else (None, None)
    return (
        *(t.trajectory_id, group_id, t.attempt, t.status, t.reward, None, cause, message, t.warning),
        *(len(t.steps), t.completion_tokens, t.oldest_version, t.seconds),
        *(t.trained_reward if split == "train" else None, json.dumps(t.components)),
    )


def _step_rows(t: Trajectory, split: str) -> Iterator[tuple[Any, ...]]:
    state, why = StepState.RECORDED, None
    if split != "train":
        state = StepState.EVALUATED
    elif t.reward is None:
        state, why = StepState.DROPPED, DropReason.FAILED
    elif t.dropped is not None:
        state, why = StepState.DROPPED, t.dropped
    for number, step in enumerate(t.steps):
        lengths = (len(step.prompt_ids), len(step.completion_ids))
        became = (state, why) if step.dropped is None else (StepState.DROPPED, step.dropped)
        yield (t.trajectory_id, number, *became, *lengths, step.stop_reason, step.reward)
