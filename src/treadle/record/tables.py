"""The ledger's tables, which any SQLite client can open."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = """\
CREATE TABLE groups (
  group_id TEXT PRIMARY KEY, idx INTEGER NOT NULL, split TEXT NOT NULL, epoch INTEGER NOT NULL,
  position INTEGER NOT NULL, batch INTEGER NOT NULL, task TEXT NOT NULL, trained_version INTEGER);
CREATE TABLE trajectories (
  trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL REFERENCES groups, attempt INTEGER NOT NULL,
  status TEXT NOT NULL, reward REAL, advantage REAL, failure_cause TEXT, failure_message TEXT, warning TEXT NOT NULL,
  steps INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, oldest_version INTEGER, newest_version INTEGER,
  seconds REAL NOT NULL, shard TEXT NOT NULL, metrics TEXT NOT NULL,
  trained_reward REAL, components TEXT NOT NULL, failure_traceback TEXT, blocked_seconds REAL NOT NULL,
  start_source TEXT, start_steps INTEGER NOT NULL, start_probability REAL);
CREATE TABLE steps (
  trajectory_id TEXT NOT NULL REFERENCES trajectories, step INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT,
  prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, stop_reason TEXT NOT NULL, reward REAL NOT NULL,
  PRIMARY KEY (trajectory_id, step)) WITHOUT ROWID;
CREATE TABLE checkpoints (
  number INTEGER PRIMARY KEY, update_number INTEGER NOT NULL, directory TEXT NOT NULL, state TEXT NOT NULL);
CREATE TABLE files (name TEXT PRIMARY KEY, sha256 TEXT NOT NULL);
CREATE TABLE open_calls (
  epoch INTEGER NOT NULL, position INTEGER NOT NULL, attempt INTEGER NOT NULL, call INTEGER NOT NULL,
  request BLOB NOT NULL, tokens BLOB NOT NULL, sha256 TEXT NOT NULL, PRIMARY KEY (epoch, position, attempt, call));
CREATE TABLE open_steps (
  trajectory_id TEXT NOT NULL, step INTEGER NOT NULL, tokens BLOB NOT NULL, sha256 TEXT NOT NULL,
  PRIMARY KEY (trajectory_id, step));
CREATE INDEX groups_idx ON groups (split, idx);
CREATE INDEX trajectories_group ON trajectories (group_id);
"""


def insert(db: sqlite3.Connection, into: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows with the same columns; missing columns are NULL: `insert(db, "OR IGNORE INTO files", rows)`."""
    if rows:
        names = rows[0].keys()
        values = ", ".join(f":{name}" for name in names)
        db.executemany(f"INSERT {into} ({', '.join(names)}) VALUES ({values})", rows)


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
