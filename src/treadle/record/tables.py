"""The ledger's tables, and the checksum at the end of each row.

SQLite's own checks cover only the structure of a database. `insert` and `update` write a row's checksum with it;
`check_table` and `check_row` compare. Any SQLite client can open the file.

    ("g000012.3", 0, "trained", None, 153, 42, "stop", 0.0, checksum=row_checksum(...))
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = """\
CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, idx INTEGER NOT NULL, split TEXT NOT NULL, epoch INTEGER NOT NULL,
  position INTEGER NOT NULL, batch INTEGER NOT NULL, task TEXT NOT NULL, trained_version INTEGER,
  checksum INTEGER NOT NULL);
CREATE TABLE trajectories (
  trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups, attempt INTEGER NOT NULL,
  status TEXT NOT NULL, reward REAL, advantage REAL, failure_cause TEXT, failure_message TEXT, warning TEXT NOT NULL,
  steps INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, oldest_version INTEGER, newest_version INTEGER,
  seconds REAL NOT NULL, shard TEXT NOT NULL, metrics TEXT NOT NULL,
  trained_reward REAL, components TEXT NOT NULL, failure_traceback TEXT, blocked_seconds REAL NOT NULL,
  checksum INTEGER NOT NULL);
CREATE TABLE steps (
  trajectory_id TEXT NOT NULL REFERENCES trajectories, step INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT,
  prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, stop_reason TEXT NOT NULL, reward REAL NOT NULL,
  checksum INTEGER NOT NULL, PRIMARY KEY (trajectory_id, step)) WITHOUT ROWID;
CREATE TABLE checkpoints (
  number INTEGER PRIMARY KEY, update_number INTEGER NOT NULL, directory TEXT NOT NULL, state TEXT NOT NULL,
  checksum INTEGER NOT NULL);
CREATE TABLE files (name TEXT PRIMARY KEY, sha256 TEXT NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE open_calls (
  epoch INTEGER NOT NULL, position INTEGER NOT NULL, attempt INTEGER NOT NULL, call INTEGER NOT NULL,
  request TEXT NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, versions TEXT NOT NULL,
  stop_reason TEXT NOT NULL, routing BLOB, routing_shape TEXT,
  checksum INTEGER NOT NULL, PRIMARY KEY (epoch, position, attempt, call));
CREATE INDEX groups_idx ON groups (split, idx);
CREATE INDEX trajectories_group ON trajectories (group_id);
"""
OPEN_STEPS = """\
CREATE TABLE IF NOT EXISTS open_steps (
  trajectory_id TEXT NOT NULL, step INTEGER NOT NULL, row BLOB NOT NULL, PRIMARY KEY (trajectory_id, step));
"""
"""Table of a ledger written by `treadle serve`: packed steps of trajectories that may continue."""
KEYS = {"groups": 1, "trajectories": 1, "steps": 2, "checkpoints": 1, "files": 1, "open_calls": 4}
"""Table -> number of leading columns in the primary key."""


class Damaged(Exception):
    """Raised for data that fails its checksum."""


def row_checksum(values: Iterable[Any]) -> int:
    """Return the CRC-32 of a row's values without its checksum, the same before writing and after reading.

    SQLite returns integers in REAL columns as floats, -0.0 as 0.0, NaN as NULL, and enumerations as their text.
    """
    return zlib.crc32(ascii([_canonical(value) for value in values]).encode())


def _canonical(value: Any) -> Any:
    if isinstance(value, int | float):
        return float(value) + 0.0 if value == value else None
    return str(value) if isinstance(value, str) else value


def insert(db: sqlite3.Connection, into: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Insert rows with their checksums; missing columns are NULL: `insert(db, "OR IGNORE INTO files", rows)`."""
    names = _columns(db, into.split()[-1])
    statement = f"INSERT {into} VALUES ({', '.join('?' * len(names))})"
    complete = ([row.get(name) for name in names[:-1]] for row in rows)
    db.executemany(statement, ((*values, row_checksum(values)) for values in complete))


def update(db: sqlite3.Connection, table: str, changes: Mapping[str, Any], where: str, *values: Any) -> int:
    """Change rows and their checksums; return their number. Raises Damaged if one fails its checksum."""
    names, rows = _columns(db, table), db.execute(f"SELECT * FROM {table} WHERE {where}", values).fetchall()
    columns = ", ".join(f"{name} = ?" for name in (*changes, "checksum"))
    keys = names[: KEYS[table]]
    statement = f"UPDATE {table} SET {columns} WHERE {' AND '.join(f'{key} = ?' for key in keys)}"
    for row in rows:
        check_row(table, row)
        changed = {**dict(zip(names, row, strict=True)), **changes}
        del changed["checksum"]
        db.execute(statement, (*changes.values(), row_checksum(changed.values()), *row[: len(keys)]))
    return len(rows)


def check_row(table: str, row: Sequence[Any]) -> None:
    """Raise Damaged if a whole row fails its checksum."""
    if row_checksum(row[:-1]) != row[-1]:
        raise Damaged(f"a row is not as it was written: {', '.join(map(str, row[: KEYS[table]]))} of {table}")


def check_table(db: sqlite3.Connection, table: str) -> None:
    """Raise Damaged if a table's definition, rows or indexes are damaged."""
    definitions = db.execute("SELECT sql || ';\n' FROM sqlite_schema WHERE tbl_name = ? AND sql NOT NULL", (table,))
    if not all(definition in SCHEMA for (definition,) in definitions):
        raise Damaged(f"the definition of the table {table} is not the one that it was made with")
    for row in db.execute(f"SELECT * FROM {table} NOT INDEXED"):
        check_row(table, row)
    [problem] = db.execute(f"PRAGMA integrity_check({table})").fetchone()
    if problem != "ok":
        raise Damaged(" ".join(str(problem).split()))


def _columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [name for name, *_ in db.execute(f"SELECT * FROM {table} LIMIT 0").description]


_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}


def journal_mode(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return SQLite's journal mode for a file: WAL, so that readers never block it; DELETE on network drives and FUSE.

    mounts: the system's table of mounts; WAL if there is none.
    """
    if not mounts.is_file():
        return "WAL"
    rows = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    # of two mounts on one point, the later is on top
    kinds = {Path(row[1].replace("\\040", " ")): row[2] for row in rows}
    kind = next((kinds[folder] for folder in path.resolve().parents if folder in kinds), "")
    return "DELETE" if kind in _NETWORK or kind.startswith("fuse") else "WAL"
