"""Reading a ledger that a run may be writing, without a trace: nothing is written, and no run ever waits.

`Ledger` proves whole tables, which a command can afford once. Here each query opens the file for itself, so that it
sees the newest state and holds nothing afterwards, and what is proven is the rows that are shown.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from treadle.core.errors import DamageError, RunError
from treadle.orchestration.store.checked_database import row_checksum
from treadle.orchestration.store.ledger import salvage

_WAL = 2  # of the read version in a database's header
_OTHER_VERSION = "another version of Treadle made this run: look at it with that one"
_WAITS = 2.0  # seconds for a run that writes without WAL


class LedgerReader:
    """Reads one run's ledger; any number of threads may.

    All methods raise RunError where there is no ledger, or SQLite cannot read it, with what can be done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def signature(self) -> tuple[int, ...]:
        """Return figures that change whenever the ledger does; none where there is none."""
        files = (self.path, self._beside("-wal"))
        return tuple(n for f in files if f.is_file() for s in (f.stat(),) for n in (s.st_ino, s.st_mtime_ns, s.st_size))

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Return the rows of a SELECT, as one short read transaction. Text that is not UTF-8 has U+FFFD in it."""
        while True:
            immutable = self._is_quiet()
            try:
                rows = self._read(sql, values, immutable)
            except sqlite3.Error as error:
                if immutable and not self._is_quiet():
                    continue
                raise self._unreadable(error) from error
            if not immutable or self._is_quiet():
                return rows

    def proven(self, table: str, where: str, *values: Any) -> list[dict[str, Any]]:
        """Return whole rows of a table. Raises DamageError if one of them is not as it was written."""
        rows = self.query(f"SELECT * FROM {table} WHERE {where}", *values)
        for row in rows:
            if row_checksum(*(value for name, value in row.items() if name != "checksum")) != row["checksum"]:
                key = ", ".join(str(value) for value in list(row.values())[:2])
                message = f"the ledger {self.path} is damaged: a row is not as it was written: {key} of {table}"
                raise DamageError(f"{message}; {salvage(self.path.parent)}")
        return rows

    def _read(self, sql: str, values: Sequence[Any], immutable: bool) -> list[dict[str, Any]]:
        how = "immutable=1" if immutable else "mode=ro&readonly_shm=1"
        uri = f"{self.path.resolve().as_uri()}?{how}"
        with closing(sqlite3.connect(uri, uri=True, timeout=_WAITS)) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = lambda content: content.decode("utf-8", "replace")
            connection.execute("PRAGMA query_only=1")
            return [_Row(row) for row in connection.execute(sql, tuple(values))]

    def _is_quiet(self) -> bool:
        """Return whether no write-ahead log holds anything: then nothing changes the file, and no lock is needed."""
        try:
            with self.path.open("rb") as file:
                header = file.read(20)
            log, index = self._beside("-wal"), self._beside("-shm")
            has_log = log.is_file() and log.stat().st_size > 0 and index.is_file()
        except OSError as error:
            raise RunError(f"no ledger at {self.path}: {error.strerror or error}") from error
        return len(header) == 20 and header[19] == _WAL and not has_log

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    def _unreadable(self, error: sqlite3.Error) -> RunError:
        of_another_version = str(error).startswith(("no such column", "no such table"))
        remedy = _OTHER_VERSION if of_another_version else salvage(self.path.parent)
        return RunError(f"the ledger {self.path} cannot be read: {error}; {remedy}")


class _Row(dict[str, Any]):
    """Is a row of the ledger. Asking for a column that it does not have raises RunError: another version wrote it."""

    def __missing__(self, name: str) -> Any:
        raise RunError(f"the ledger has no column {name!r}; {_OTHER_VERSION}")
