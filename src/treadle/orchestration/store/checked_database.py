"""The ledger's database: SQLite, where every row and the schema carry a checksum.

SQLite's own checks see the structure of a database only. Here triggers write each row's checksum, whichever statement
writes the row, and let none change a row that no longer matches it; and all tables that a SELECT reads are checked
before it returns. Any SQLite client reads the database; only `CheckedDatabase` writes to it.
"""

from __future__ import annotations

import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from treadle.core.errors import DamageError, RunError

_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError)  # the latter where SQLite's own message quotes what is damaged
_DAMAGED_ROW = "a row is not as it was written"
_NO_TEXT = ("user-defined function raised exception", "Could not decode to UTF-8")  # a text in a row is not UTF-8


class CheckedDatabase:
    """Holds one connection. Reading or changing a row raises DamageError if it is not as it was written.

    schema: CREATE statements for a new database; each table has a column `checksum INTEGER` and a primary key.
    remedy: ends the message about a database that is damaged or cannot be read.
    """

    def __init__(self, path: Path, schema: str, remedy: str, read_only: bool = False) -> None:
        self.path, self._remedy = path, remedy
        self._lock = threading.Lock()
        self._proven = set[str]()  # tables
        try:
            name = f"{path.resolve().as_uri()}?mode=ro" if read_only else path
            self._connection = sqlite3.connect(name, uri=read_only, check_same_thread=False)  # the lock sees to that
            self._connection.row_factory = sqlite3.Row
            self._connection.create_function("row_checksum", -1, row_checksum, deterministic=True)
            if not read_only:
                self._open_for_writing(schema)
            if self._read_pragma("user_version") != _schema_checksum(self._connection):
                raise self._damage("its tables are not those it was made with")
        except _ERRORS as error:
            raise self._unreadable(error) from error

    def _open_for_writing(self, schema: str) -> None:
        self._connection.execute(f"PRAGMA journal_mode={journal_mode(self.path)}")  # no effect where it cannot be had
        self._connection.execute("PRAGMA synchronous=EXTRA")  # FULL, and as durable without WAL
        if not _tables(self._connection):
            self._connection.executescript(f"BEGIN; {_with_checksums(schema)} COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit on leaving, roll back on any error. Raises RunError where the disk fails, DamageError."""
        try:
            with self._lock, self._connection:
                yield self._connection
        except _ERRORS as error:
            if _shows_damage(error):
                raise self._unreadable(error) from error
            if not isinstance(error, sqlite3.OperationalError):
                raise
            raise RunError(f"the ledger could not be written: {error}; free disk space, then --resume") from error

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Return the rows of a SELECT. Raises DamageError if a table that it reads is damaged."""
        with self._lock:
            try:
                with self._noting_tables() as read:
                    try:
                        with closing(self._connection.execute(sql, values)) as cursor:
                            rows = [dict(row) for row in cursor]
                    finally:  # also where it failed: damage may be the reason
                        self._prove_tables(frozenset(read))
            except _ERRORS as error:
                raise self._unreadable(error) from error
        return rows

    def prove(self) -> None:
        """Raise DamageError unless the whole database is as it was written."""
        with self._lock:
            try:
                self._prove_structure("quick_check")
                self._prove_tables(_tables(self._connection))
            except _ERRORS as error:
                raise self._unreadable(error) from error

    def backup(self, path: Path) -> None:
        """Write the database, as it is now, to a new file of its own, without WAL. Raises RunError."""
        path.unlink(missing_ok=True)
        try:
            with self._lock, closing(sqlite3.connect(path)) as copy:
                self._connection.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
        except _ERRORS as error:
            raise self._unreadable(error) from error

    def close(self) -> None:
        """Close the connection once no other thread uses it: SQLite would end the process."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def _noting_tables(self) -> Iterator[set[str]]:
        """Yield a set that SQLite fills with the tables that statements read meanwhile."""
        read = set[str]()

        def note(action: int, table: str | None, *_: object) -> int:
            if action == sqlite3.SQLITE_READ and table is not None:
                read.add(table)
            return sqlite3.SQLITE_OK

        self._connection.set_authorizer(note)
        try:
            yield read
        finally:
            self._connection.set_authorizer(None)

    def _prove_tables(self, tables: Iterable[str]) -> None:
        """Check whole tables, not only the rows that were selected: damage may also hide one."""
        for table in set(tables) & set(_tables(self._connection)) - self._proven:
            columns, keys = _columns(self._connection, table)
            wrong = f"SELECT {keys} FROM {table} NOT INDEXED WHERE checksum IS NOT row_checksum({columns})"
            row = self._connection.execute(wrong).fetchone()
            if row is not None:
                raise self._damage(f"{_DAMAGED_ROW}: {', '.join(map(str, row))} of {table}")
            self._prove_structure(f"integrity_check({table})")
            self._proven.add(table)

    def _prove_structure(self, check: str) -> None:
        found = self._read_pragma(check)
        if found != "ok":
            raise self._damage(" ".join(str(found).split()))

    def _read_pragma(self, pragma: str) -> Any:
        return self._connection.execute(f"PRAGMA {pragma}").fetchone()[0]

    def _unreadable(self, error: Exception) -> RunError:
        if _shows_damage(error):
            return self._damage(_DAMAGED_ROW if str(error).startswith(_NO_TEXT) else str(error))
        return RunError(f"the ledger {self.path} cannot be read: {error}; {self._remedy}")

    def _damage(self, what: str) -> DamageError:
        return DamageError(f"the ledger {self.path} is damaged: {what}; {self._remedy}")


def _shows_damage(error: Exception) -> bool:
    """Return whether the error is about the database's content, not about the disk, other processes or a statement."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    says_so = isinstance(error, UnicodeDecodeError) or str(error).startswith((_DAMAGED_ROW, *_NO_TEXT))
    return says_so or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def row_checksum(*values: Any) -> int:
    """Return the CRC-32 of a row: `ascii` writes each value with its type, the same in every version of Python."""
    return zlib.crc32(ascii(values).encode())


def _schema_checksum(connection: sqlite3.Connection) -> int:
    """Return the lower 31 bits of the CRC-32 of all CREATE statements, for `user_version`; 0 without any."""
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name").fetchall()
    return zlib.crc32(ascii([tuple(row) for row in rows]).encode()) & 0x7FFFFFFF if rows else 0


@cache
def _with_checksums(schema: str) -> str:
    """Return the schema with the triggers for its tables, and its own checksum in `user_version`."""
    with closing(sqlite3.connect(":memory:")) as scratch:
        scratch.executescript(schema)
        triggers = "".join(_triggers(table, *_columns(scratch, table)) for table in _tables(scratch))
        scratch.executescript(triggers)
        return f"{schema} {triggers} PRAGMA user_version={_schema_checksum(scratch)};"


def _triggers(table: str, columns: str, keys: str) -> str:
    old = ", ".join(f"OLD.{name}" for name in columns.split(", "))
    key = " AND ".join(f"{name} = NEW.{name}" for name in keys.split(", "))
    write = f"UPDATE {table} SET checksum = row_checksum({columns}) WHERE {key};"
    return f"""
        CREATE TRIGGER {table}_inserted AFTER INSERT ON {table} BEGIN {write} END;
        CREATE TRIGGER {table}_updated AFTER UPDATE OF {columns} ON {table} BEGIN {write} END;
        CREATE TRIGGER {table}_proven BEFORE UPDATE OF {columns} ON {table} WHEN OLD.checksum IS NOT row_checksum({old})
        BEGIN SELECT RAISE(ABORT, '{_DAMAGED_ROW}'); END;
    """


def _tables(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return [str(name) for (name,) in rows]


def _columns(connection: sqlite3.Connection, table: str) -> tuple[str, str]:
    """Return the columns that a row's checksum is over, and those of the primary key, each as a list in SQL."""
    rows = connection.execute("SELECT name, pk FROM pragma_table_info(?)", (table,)).fetchall()
    return ", ".join(n for n, _ in rows if n != "checksum"), ", ".join(n for n, number in rows if number)


_NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}


def journal_mode(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Return SQLite's journal mode for a file: WAL, or DELETE on network filesystems and FUSE, where WAL does not work.

    With WAL a reader never blocks the run. mounts: the system's table of mounts; where there is none, WAL.
    """
    if not mounts.is_file():
        return "WAL"
    rows = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    kinds = {Path(row[1].replace("\\040", " ")): row[2] for row in rows}  # of two on one point the later is on top
    kind = next((kinds[folder] for folder in path.resolve().parents if folder in kinds), "")
    return "DELETE" if kind in _NETWORK or kind.startswith("fuse") else "WAL"
