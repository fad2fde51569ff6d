"""Reading the ledger: all queries of the run itself, its reports and its viewer."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.core.errors import DamageError, RunError
from treadle.core.files import MANIFEST, WrittenFile, sha256_of
from treadle.core.types import DropReason

SCHEMA_VERSION = 6
"""`schema_version` in config.yaml, `user_version` of the ledger."""

LEDGER = "ledger.sqlite"
OPEN_SHARD = "open"
"""Name in place of a shard, for trajectories with their steps still in the ledger."""

Row = dict[str, Any]

UNTAKEN = "(idx >= ? OR idx IN (SELECT value FROM json_each(?)))"  # cursor, outstanding
PLACES = """
SELECT group_id, row_number() OVER places AS place, lag(group_id) OVER places AS previous, lead(group_id) OVER places
AS next FROM (
  SELECT *, iif(split = 'train', idx, min(latest) OVER (PARTITION BY evaluation)) AS after FROM (
    SELECT group_id, idx, split, rowid AS recorded, max(iif(split = 'train', idx, -1)) OVER (ORDER BY rowid) AS latest,
    substr(group_id, 1, iif(split = 'train', 0, instr(group_id, '-'))) AS evaluation FROM groups))
WINDOW places AS (ORDER BY after, evaluation, idx, recorded)"""
"""Query: each group's place in the order of submission, independent of completion, and its neighbors there.

An evaluation comes after the groups recorded before it.
"""
_STEPS = "steps JOIN trajectories USING (trajectory_id) JOIN groups USING (group_id)"
_NOT_UTF8 = "Could not decode to UTF-8"  # SQLite's message


def salvage(run: Path) -> str:
    """Return the remedy for a run with an unusable ledger, for an error message."""
    checkpoints = sorted(path for path in (run / "checkpoints").glob("step-*") if path.is_dir())
    if not checkpoints:
        return "restore it from a copy, or start a new run"
    return (
        f"restore it from a copy, or start a new run from a checkpoint: model.path={checkpoints[-1]} model.build=null"
    )


def other_version(what: str, version: object) -> RunError:
    return RunError(
        f"{what} has schema_version {version!r}, and this Treadle reads {SCHEMA_VERSION} only; use the version of "
        "Treadle that wrote it"
    )


def trace_file(version: int) -> str:
    """Return the name in `traces/` of the file with traces of groups of this `trained_version`."""
    return f"v{version:06d}.parquet"


def manifest_name(checkpoint: str) -> str:
    return f"checkpoints/{checkpoint}/{MANIFEST}"


class LedgerReader:
    """Read-only access to the ledger of a run, possibly live, without ever blocking it. Thread-safe.

    Each query reopens the file, and so sees the newest state. All methods raise RunError if the ledger cannot be read,
    DamageError if it is damaged.
    """

    def __init__(self, path: Path, remedy: str = "") -> None:
        self.path, self._remedy = path, remedy

    def signature(self) -> tuple[int, ...]:
        """Return numbers that change whenever the ledger does; empty without a ledger."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return tuple(n for f in files if f.is_file() for s in (f.stat(),) for n in (s.st_ino, s.st_mtime_ns, s.st_size))

    def query(self, sql: str, *values: Any) -> list[Row]:
        with self._reading() as db:
            return _dicts(db.execute(sql, values))

    def prove(self) -> None:
        """Raise DamageError if the file is damaged, by SQLite's own check: of its structure, not of values."""
        [row] = self.query("PRAGMA integrity_check(1)")
        if row["integrity_check"] != "ok":
            raise self._damage(" ".join(row["integrity_check"].split()))

    def _damage(self, problem: object) -> DamageError:
        return DamageError(f"the ledger {self.path} is damaged: {problem}; {self.remedy}")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._errors("cannot be read"), self._opened() as db:
            yield db

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        if not self.path.is_file():
            raise RunError(f"no ledger at {self.path}; is {self.path.parent} a run directory?")
        with closing(sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            self._check_version(db)
            yield db

    def _check_version(self, db: sqlite3.Connection) -> None:
        [version] = db.execute("PRAGMA user_version").fetchone()
        if version != SCHEMA_VERSION:
            if not version:
                raise RunError(f"the ledger {self.path} is empty; {self.remedy}")
            raise other_version(f"the ledger {self.path}", version)

    @contextmanager
    def _errors(self, what: str, remedy: str = "") -> Iterator[None]:
        """Raise DamageError for a damaged file, RunError if the disk or a process is the cause."""
        try:
            yield
        except (UnicodeDecodeError, sqlite3.DatabaseError) as error:
            # SQLite's message quotes the damaged data
            if isinstance(error, UnicodeDecodeError) or str(error).startswith(_NOT_UTF8):
                raise self._damage("a row is not as it was written: its text is not UTF-8") from error
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._damage(error) from error
            if isinstance(error, sqlite3.OperationalError):
                raise RunError(f"the ledger {self.path} {what}: {error}; {remedy or self.remedy}") from error
            raise  # a bug

    @property
    def remedy(self) -> str:
        return self._remedy or salvage(self.path.parent)

    # --- checkpoints and files ---------------------------------------------------------------------------------------

    def latest_checkpoint(self) -> tuple[str, LoopState] | None:
        """Return (directory name, state) of the latest checkpoint, or None before the first."""
        rows = self.query("SELECT * FROM checkpoints ORDER BY number DESC LIMIT 1")
        return (rows[-1]["directory"], LoopState.from_json(rows[-1]["state"])) if rows else None

    def checkpoint(self, directory: str) -> LoopState:
        """Return its state. Raises RunError if it was not committed, or was rolled back."""
        rows = self.query("SELECT state FROM checkpoints WHERE directory = ? ORDER BY number", directory)
        if not rows:
            raise RunError(f"the ledger knows no checkpoint {directory!r}; resume from another one")
        return LoopState.from_json(rows[-1]["state"])

    def checkpoint_names(self) -> list[str]:
        """Return the directory names of all committed checkpoints, oldest first, without those rolled back."""
        names = self.query("SELECT directory FROM checkpoints ORDER BY number")
        return list(dict.fromkeys(row["directory"] for row in names))

    def files(self, prefix: str) -> dict[str, WrittenFile]:
        """Return recorded files with this prefix of their names in the run directory, by the rest of their names."""
        rows = [(row["name"].removeprefix(prefix), row["sha256"]) for row in self.query("SELECT * FROM files")
                if row["name"].startswith(prefix)]  # fmt: skip
        return {name: WrittenFile(name, sha256) for name, sha256 in rows}

    def shards(self) -> dict[str, WrittenFile]:
        """Return the files with the tokens of all recorded trajectories, by their names in `rollouts/`."""
        return self.files("rollouts/")

    def traces(self) -> dict[str, WrittenFile]:
        """Return the files with the traces of trained groups, by their names in `traces/` (`trace_file`)."""
        return self.files("traces/")

    def shard(self, name: str) -> WrittenFile:
        if (sha256 := self.file_sha256(f"rollouts/{name}")) is None:
            raise DamageError(f"the ledger {self.path} does not know the shard {name}; restore it from a copy")
        return WrittenFile(name, sha256)

    def file_sha256(self, name: str) -> str | None:
        """Return the SHA-256 of a file, by its name in the run directory; None if it is not recorded."""
        rows = self.query("SELECT sha256 FROM files WHERE name = ?", name)
        return rows[0]["sha256"] if rows else None

    def open_steps(self) -> list[bytes]:
        """Return the packed tokens of all steps kept in the ledger, in order. Raises DamageError."""
        return [row["tokens"] for row in self._tokens("open_steps", "trajectory_id, step")]

    def open_calls(self) -> list[Row]:
        """Return the calls of attempts in progress, in order. Raises DamageError."""
        return self._tokens("open_calls", "epoch, position, attempt, call")

    def _tokens(self, table: str, order: str) -> list[Row]:
        """Return the rows of a table with tokens that are in no shard yet, and compare their SHA-256."""
        rows = self.query(f"SELECT * FROM {table} ORDER BY {order}")
        if any(sha256_of(row["tokens"]) != row["sha256"] for row in rows):
            raise self._damage(f"tokens in {table} are not as they were written")
        return rows

    # --- for resuming ------------------------------------------------------------------------------------------------

    def untaken(self, state: LoopState) -> list[Row]:
        """Return rows of the recorded trajectories missing in the checkpoint, in order of groups.

        For a group sampled several times, only the newest sample. waiting: number of steps that may still be trained.
        """
        return self.query(
            "SELECT g.*, t.*, (SELECT count(*) FROM steps s WHERE s.trajectory_id = t.trajectory_id AND s.state = "
            f"'recorded') AS waiting FROM trajectories t JOIN groups g USING (group_id) WHERE split = 'train' AND "
            f"{UNTAKEN} AND g.rowid = (SELECT max(rowid) FROM groups h WHERE h.split = 'train' AND h.idx = g.idx) "
            "ORDER BY g.idx, t.attempt",
            *(state.cursor, json.dumps(state.outstanding)),
        )

    def times_sampled(self) -> dict[int, int]:
        """Return group index -> number of recordings; a resumed run gives the next sample another id."""
        rows = self.query("SELECT idx, count(*) AS times FROM groups WHERE split = 'train' GROUP BY idx")
        return {row["idx"]: row["times"] for row in rows}

    def times_evaluated(self, name: str) -> int:
        """Return the number of recordings of an evaluation: `e000120` as `e000120-*`, `e000120r1-*`, `e000120r2-*`."""
        sql = "SELECT count(*) AS times FROM groups WHERE group_id = ? OR group_id GLOB ?"
        return int(self.query(sql, f"{name}-0000", f"{name}r*-0000")[0]["times"])

    # --- counts ------------------------------------------------------------------------------------------------------

    def splits(self) -> list[Row]:
        rows = self.query(
            "SELECT split, count(DISTINCT group_id) AS groups, count(*) AS trajectories, count(failure_cause) AS "
            "failed FROM trajectories JOIN groups USING (group_id) GROUP BY 1 ORDER BY 1 DESC"
        )
        columns = {"steps": "count", "prompt_tokens": "prompt_tokens", "completion_tokens": "completion_tokens"}
        states = self.step_states()
        for row in rows:
            own = [s for s in states if s["split"] == row["split"] and s["reason"] != DropReason.REPLAYED]
            row |= {k: sum(s[column] for s in own) for k, column in columns.items()}
        return rows

    def step_states(self) -> list[Row]:
        """Return steps and tokens of each split, state and reason, the most frequent first."""
        # First, so that each trajectory is looked up once.
        by_trajectory = (
            "SELECT trajectory_id, state, reason, count(*) AS count, sum(prompt_tokens) AS prompt_tokens, "
            "sum(completion_tokens) AS completion_tokens FROM steps GROUP BY 1, 2, 3"
        )
        return self.query(
            "SELECT split, state, reason, sum(s.count) AS count, sum(s.prompt_tokens) AS prompt_tokens, "
            f"sum(s.completion_tokens) AS completion_tokens FROM ({by_trajectory}) s JOIN trajectories USING "
            "(trajectory_id) JOIN groups USING (group_id) GROUP BY 1, 2, 3 ORDER BY 1 DESC, 4 DESC"
        )

    def statuses(self) -> list[Row]:
        return self.query(
            "SELECT split, status, count(*) AS count FROM trajectories JOIN groups USING (group_id) GROUP BY 1, 2 "
            "ORDER BY 1 DESC, 3 DESC"
        )

    def stop_reasons(self) -> list[Row]:
        return self.query(
            f"SELECT split, stop_reason, count(*) AS count FROM {_STEPS} GROUP BY 1, 2 ORDER BY 1 DESC, 3 DESC"
        )

    def failures(self, limit: int = -1) -> list[Row]:
        """Return causes and messages, most frequent first, with an example trajectory and traceback; limit -1: all."""
        return self.query(
            "SELECT cause, message, count, trajectory_id, failure_traceback AS traceback FROM "
            "(SELECT failure_cause AS cause, failure_message AS message, count(*) AS count, min(trajectory_id) AS "
            "trajectory_id FROM trajectories WHERE failure_cause IS NOT NULL GROUP BY 1, 2) "
            "JOIN trajectories USING (trajectory_id) ORDER BY count DESC, cause, message LIMIT ?",
            limit,
        )

    def blocked(self) -> Row:
        return self.query(
            "SELECT count(*) AS count, sum(blocked_seconds) AS seconds, min(trajectory_id) AS trajectory_id "
            "FROM trajectories WHERE blocked_seconds > 0"
        )[0]

    def starts(self) -> Row:
        """Return counts of the attempts that began in the middle of a recorded one, and of their replayed steps."""
        return self.query(
            "SELECT count(*) AS attempts, count(DISTINCT group_id) AS groups, total(start_steps) AS steps, "
            "count(DISTINCT start_source) AS sources FROM trajectories WHERE start_steps > 0"
        )[0]

    def warnings(self) -> list[Row]:
        return self.query(
            "SELECT warning AS message, count(*) AS count, min(trajectory_id) AS trajectory_id FROM trajectories "
            "WHERE warning != '' GROUP BY 1 ORDER BY 2 DESC LIMIT 5"
        )

    def trained_steps(self) -> list[Row]:
        """Return trajectories in order of groups; trained: JSON list of steps that were or may still be trained."""
        return self.query(
            "SELECT split, group_id, trajectory_id, shard, trained_version, (SELECT json_group_array(step) FROM "
            "steps s WHERE s.trajectory_id = t.trajectory_id AND state IN ('trained', 'recorded')) AS trained FROM "
            "groups JOIN trajectories t USING (group_id) ORDER BY split DESC, idx, groups.rowid, attempt"
        )

    def sampled_once(self) -> list[Row]:
        """Return trajectories with their groups' task and split, in order of groups, without resampled ones."""
        return self.query(
            "SELECT t.*, g.task, g.split FROM groups g JOIN trajectories t USING (group_id) WHERE NOT EXISTS (SELECT 1 "
            "FROM steps s WHERE s.trajectory_id = t.trajectory_id AND s.reason = 'resampled') "
            "ORDER BY g.split DESC, g.idx, g.rowid, t.attempt"
        )

    # --- trajectories and groups -------------------------------------------------------------------------------------

    def newest(self, count: int) -> list[Row]:
        return self.query(
            "SELECT t.trajectory_id, g.split, json_extract(g.task, '$.task_id') AS task_id, t.status, t.reward, "
            "t.advantage, t.steps, t.completion_tokens, t.failure_cause, t.failure_message, t.start_source, "
            "t.start_steps "
            "FROM trajectories t JOIN groups g USING (group_id) ORDER BY t.rowid DESC LIMIT ?",
            count,
        )

    def trajectory(self, trajectory_id: str) -> Row | None:
        """Return a trajectory's row with its group's task, split and trained_version."""
        rows = self.query(
            "SELECT t.*, g.task, g.split, g.trained_version FROM trajectories t JOIN groups g USING (group_id) "
            "WHERE trajectory_id = ?",
            trajectory_id,
        )
        return rows[0] if rows else None

    def before_and_after(self, first: str, last: str, success: float, component: str | None) -> tuple[str, str] | None:
        """Return attempts at one task in two evaluations, preferably from failure to success. component: to compare.

        Copies of the policy in other roles (`g000012.3.opponent`) are left out.
        """
        judged = "coalesce((SELECT value FROM json_each({0}.components) WHERE key = ?), {0}.reward)"
        values = (component, success) * 2
        rows = self.query(
            "SELECT b.trajectory_id AS before, a.trajectory_id AS after FROM trajectories b JOIN groups gb USING "
            "(group_id) JOIN groups ga ON ga.position = gb.position JOIN trajectories a ON a.group_id = ga.group_id "
            "WHERE gb.group_id GLOB ? AND ga.group_id GLOB ? AND a.trajectory_id NOT GLOB '*.*.*' AND b.trajectory_id "
            f"NOT GLOB '*.*.*' ORDER BY coalesce({judged.format('a')} >= ?, 0) DESC, "
            f"coalesce({judged.format('b')} < ?, 0) DESC, gb.position LIMIT 1",
            *(self._last_time(first), self._last_time(last), *values),
        )
        return (rows[0]["before"], rows[0]["after"]) if rows else None

    def _last_time(self, evaluation: str) -> str:
        """Return the pattern of an evaluation's groups; for a repeated one, of the last repetition."""
        times = self.times_evaluated(evaluation)
        return f"{evaluation}r{times - 1}-*" if times > 1 else f"{evaluation}-*"

    def evaluations(self) -> list[str]:
        rows = self.query(
            "SELECT substr(group_id, 1, instr(group_id, '-') - 1) AS name FROM groups WHERE split != 'train' "
            "GROUP BY 1 ORDER BY min(rowid)"
        )
        return [row["name"] for row in rows]

    def evaluated_groups(self, evaluation: str) -> list[Row]:
        return self.query("SELECT * FROM groups WHERE group_id GLOB ? ORDER BY idx", f"{evaluation}-*")

    def groups_of_task(self, task_id: str, split: str) -> list[Row]:
        which = "split = ? AND instr(task, ?) AND json_extract(task, '$.task_id') = ? ORDER BY rowid"
        return self.query(f"SELECT * FROM groups WHERE {which}", split, json.dumps(task_id)[1:-1], task_id)

    def attempts(self, groups: Sequence[str]) -> list[Row]:
        which = "group_id IN (SELECT value FROM json_each(?)) ORDER BY attempt, rowid"
        return self.query(f"SELECT * FROM trajectories WHERE {which}", json.dumps(groups))

    def attempts_states(self, groups: Sequence[str]) -> list[Row]:
        return self.query(
            "SELECT trajectory_id, state, reason, count(*) AS count FROM steps WHERE trajectory_id IN (SELECT "
            "trajectory_id FROM trajectories WHERE group_id IN (SELECT value FROM json_each(?))) GROUP BY 1, 2, 3",
            json.dumps(groups),
        )

    def steps(self, trajectory_id: str) -> list[Row]:
        return self.query("SELECT * FROM steps WHERE trajectory_id = ? ORDER BY step", trajectory_id)

    def neighbors(self, group_id: str) -> Row:
        """Return the `previous` and `next` group in the order of `PLACES`; None at the ends."""
        return self.query(f"SELECT previous, next FROM ({PLACES}) WHERE group_id = ?", group_id)[0]

    def trajectory_neighbors(self, trajectory_id: str, group_id: str) -> Row:
        """Return the `previous` and `next` trajectory, of the same group or of a neighbor of it."""
        around = self.neighbors(group_id)
        rows = self.query(
            "SELECT trajectory_id FROM json_each(?) JOIN trajectories ON group_id = value "
            "ORDER BY json_each.key, attempt, trajectories.rowid",
            json.dumps([around["previous"], group_id, around["next"]]),
        )
        names = [None, *(row["trajectory_id"] for row in rows), None]
        at = names.index(trajectory_id)
        return {"previous": names[at - 1], "next": names[at + 1]}

    def trained_by(self, versions: Sequence[int], evaluation: str = "") -> list[Row]:
        """Return trajectory_id, shard and reward of what these versions trained, or evaluated as `evaluation*`."""
        return self.query(
            "SELECT trajectory_id, shard, reward FROM trajectories JOIN groups USING (group_id) WHERE trained_version "
            "IN (SELECT value FROM json_each(?)) OR (?2 != '' AND group_id GLOB ?2 || '*') "
            "ORDER BY shard, trajectories.rowid",
            *(json.dumps(versions), evaluation),
        )

    def training_shards(self) -> list[str]:
        sql = "SELECT DISTINCT shard FROM trajectories JOIN groups USING (group_id) WHERE split = 'train'"
        return [row["shard"] for row in self.query(sql)]

    def training(self) -> list[Row]:
        """Return training trajectories in order of groups, with shard, index of the group, reward and seconds."""
        return self.query(
            "SELECT t.shard, g.group_id, g.idx, t.trajectory_id, t.attempt, t.reward, t.seconds "
            "FROM groups g JOIN trajectories t USING (group_id) WHERE g.split = 'train' "
            "ORDER BY g.idx, g.group_id, t.attempt"
        )


def _dicts(cursor: sqlite3.Cursor) -> list[Row]:
    names = [name for name, *_ in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


@dataclass(frozen=True, slots=True)
class LoopState:
    """All state for resuming, besides the weights and the optimizer.

    cursor: groups started so far, in submission order; outstanding: those of them not taken for training.
    evaluations: held-out results so far, for the summary. failed_tasks: task_id -> consecutive groups with too few
    graded attempts. began: date of the run in ISO format, for templates. starts: `loop.starts.Starts.state`.
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
    starts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> LoopState:
        state = json.loads(text)
        return cls(**{**state, **{name: tuple(state[name]) for name in ("evaluations", "outstanding")}})
