"""No row is read, or changed, that is not as it was written."""

import random
import shutil
import sqlite3
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.sqlite_pages import content_bytes
from treadle.core.errors import DamageError, RunError
from treadle.orchestration.store.checked_database import CheckedDatabase

SCHEMA = """
CREATE TABLE fruit (name TEXT PRIMARY KEY, weight REAL, seeds INTEGER, checksum INTEGER);
CREATE TABLE crates (
  fruit TEXT, number INTEGER, label BLOB, checksum INTEGER, PRIMARY KEY (fruit, number)) WITHOUT ROWID;
CREATE INDEX by_seeds ON fruit (seeds);
"""
TABLES = ("fruit", "crates")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(opened(tmp_path / "db")) as database:
        fill(database, 40)
    return tmp_path / "db"


def opened(path: Path, read_only: bool = False) -> CheckedDatabase:
    return CheckedDatabase(path, SCHEMA, "do this", read_only)


def fill(database: CheckedDatabase, rows: int) -> None:
    with database.transaction() as db:
        for row in range(rows):
            db.execute("INSERT INTO fruit VALUES (?, ?, ?, NULL)", (f"apple {row}", row / 3, row % 5))
            db.execute("INSERT INTO crates VALUES (?, ?, ?, NULL)", (f"apple {row}", row, bytes([row])))


def everything(path: Path) -> Any:
    """All rows; or, where that is refused, the error."""
    try:
        with closing(opened(path, read_only=True)) as database:
            return [database.query(f"SELECT * FROM {table} ORDER BY 1") for table in TABLES]
    except RunError as error:
        assert "\n" not in str(error) and str(error).endswith("; do this")
        return error


def flips(places: list[int], count: int) -> Iterator[tuple[int, int]]:
    draws = random.Random(count)
    for _ in range(count):
        yield draws.choice(places), 1 << draws.randrange(8)


def flipped(path: Path, place: int, mask: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= mask
    path.write_bytes(content)


def test_whatever_byte_of_a_row_or_an_index_is_flipped_it_is_seen(path: Path) -> None:
    places = content_bytes(path)
    for place, mask in flips(places, 200):
        flipped(path, place, mask)
        assert isinstance(everything(path), DamageError), place
        flipped(path, place, mask)
    assert len(everything(path)[0]) == 40


def test_whatever_byte_of_the_file_is_flipped_nothing_is_read_that_was_not_written(path: Path) -> None:
    """Free space and what a reader has no use for may be anything."""
    good = everything(path)
    seen = 0
    for place, mask in flips(list(range(path.stat().st_size)), 300):
        flipped(path, place, mask)
        found = everything(path)
        seen += isinstance(found, RunError)
        assert isinstance(found, RunError) or found == good, place
        flipped(path, place, mask)
    assert seen > 30


def test_any_statement_keeps_the_checksums(path: Path) -> None:
    with closing(opened(path)) as database:
        with database.transaction() as db:
            db.execute("UPDATE fruit SET weight = NULL WHERE seeds < 3")
            db.execute("UPDATE fruit SET name = name || '!', seeds = 1e3 WHERE seeds = 3")
            db.execute("INSERT OR IGNORE INTO fruit (name, seeds) VALUES ('apple 0', 7)")
            db.execute("INSERT OR REPLACE INTO crates VALUES ('apple 0', 0, ?, 7)", ("ä\x00\u2028",))
            db.execute("INSERT INTO crates SELECT fruit, number + 100, label, 0 FROM crates")
            db.execute("DELETE FROM crates WHERE number = 3")
        database.prove()
    assert len(everything(path)[1]) == 79


def test_a_damaged_row_is_not_changed_either(path: Path) -> None:
    """The change would give it a new checksum."""
    place = path.read_bytes().index(b"apple 7")
    flipped(path, place, 1)
    said = pytest.raises(DamageError, match="a row is not as it was written; do this")
    with closing(opened(path)) as database, said, database.transaction() as db:
        db.execute("UPDATE fruit SET weight = 0")
        db.execute("UPDATE crates SET label = NULL")
    assert isinstance(everything(path), DamageError)


def test_only_the_tables_that_are_read_are_proven(path: Path) -> None:
    flipped(path, path.read_bytes().index(struct.pack(">d", 7 / 3)), 1)  # the weight of apple 7
    with closing(opened(path, read_only=True)) as database:
        assert len(database.query("SELECT * FROM crates")) == 40
        for sql in ("SELECT 1 FROM crates WHERE EXISTS (SELECT * FROM fruit)", "SELECT count(*) FROM fruit"):
            with pytest.raises(DamageError, match="a row is not as it was written: apple 7 of fruit; do this"):
                database.query(sql)


def test_other_clients_read_it(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*), sum(seeds) FROM fruit").fetchone() == (40, 80)
        with pytest.raises(sqlite3.OperationalError, match="no such function: row_checksum"):
            connection.execute("UPDATE fruit SET seeds = 0")


def test_a_statement_that_is_wrong_is_no_damage(path: Path) -> None:
    with closing(opened(path, read_only=True)) as database:
        with pytest.raises(RunError, match="cannot be read: no such column: colour"):
            database.query("SELECT colour FROM fruit")
        assert database.query("SELECT count(*) AS n FROM fruit") == [{"n": 40}]


def test_another_schema_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TRIGGER fruit_updated")
    for read_only in (True, False):
        with pytest.raises(DamageError, match="is damaged: its tables are not those it was made with; do this"):
            opened(path, read_only)


def test_a_copy_is_a_database_like_it(path: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM INTO ?", (str(tmp_path / "vacuumed"),))
    shutil.copy(path, tmp_path / "copied")
    assert everything(tmp_path / "vacuumed") == everything(tmp_path / "copied") == everything(path)


def test_it_is_not_closed_while_another_thread_writes(tmp_path: Path) -> None:
    """SQLite has no guard of its own: a statement on a connection that is being closed ends the process."""
    database, begun, closed = opened(tmp_path / "db"), threading.Event(), threading.Event()

    def write() -> None:
        with database.transaction() as db:
            begun.set()
            assert not closed.wait(0.1)
            db.execute("INSERT INTO fruit VALUES ('apple', 1.0, 2, NULL)")

    writing = threading.Thread(target=write)
    writing.start()
    begun.wait()
    database.close()
    closed.set()
    writing.join()
    with closing(opened(tmp_path / "db", read_only=True)) as again:
        assert [row["name"] for row in again.query("SELECT * FROM fruit")] == ["apple"]
