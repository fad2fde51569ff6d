"""No row of a ledger is used, or changed, that is not as it was written."""

import random
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.sqlite_pages import content_bytes
from tests.worlds import make_group, make_step
from treadle.core.errors import Cause, DamageError, RunError
from treadle.core.files import WrittenFile
from treadle.core.types import DropReason, Failure, Status, Trajectory
from treadle.orchestration.store.ledger import Ledger
from treadle.orchestration.store.ledger_reader import LedgerReader, LoopState
from treadle.orchestration.store.tables import KEYS, row_checksum


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        fill(ledger)
    return tmp_path / "ledger.sqlite"


def fill(ledger: Ledger) -> None:
    """All kinds of values, and of changes."""
    for index in range(8):
        name = f"g{index:06d}"
        failure = Failure(Cause.AGENT, "naïve ☃ \x00 \u2028")
        attempts = [
            Trajectory(f"{name}.0", "t", 0, (make_step(), make_step()), -0.0, Status.DONE, seconds=index / 3),
            Trajectory(f"{name}.1", "t", 1, (make_step(),), None, Status.FAILED, failure),
            Trajectory(f"{name}.2", "t", 2, (make_step(),), 1, Status.DONE),
        ]
        shard = WrittenFile(f"{name}.parquet", "0" * 64)
        ledger.record([make_group(index, *attempts, name=name)], "train", index, shard)
    ledger.note_trained(0, ["g000000", "g000001"], {"g000000.0": -0.0, "g000001.0": float("nan"), "g000001.2": 1})
    ledger.commit_checkpoint("step-000001", LoopState(1, 1, 3), manifest_sha256="1" * 64)
    ledger.note_refused({"g000003.0": "ä\x00\u2028"})
    ledger.note_damaged(["g000004.0"])
    ledger.roll_back(LoopState(1, 1, 3, outstanding=(1,)), DropReason.RESAMPLED, keep=["g000005"])


def everything(path: Path) -> Any:
    """All rows; or, where that is refused, the error."""
    try:
        LedgerReader(path, "do this").prove()
        return [LedgerReader(path, "do this").rows(table, "ORDER BY 1") for table in KEYS]
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
    assert len(everything(path)[0]) == 8


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


def test_every_value_and_every_change_has_its_checksum(path: Path) -> None:
    groups, trajectories, steps, checkpoints, files = everything(path)
    assert [len(rows) for rows in (groups, trajectories, steps, checkpoints, files)] == [8, 24, 32, 1, 9]
    advantages = {row["trajectory_id"]: row["advantage"] for row in trajectories if row["advantage"] is not None}
    assert advantages == {"g000000.0": 0.0, "g000001.2": 1.0}
    assert {row["reason"] for row in steps} == {None, "failed", "damaged", "resampled"}


def test_a_damaged_row_is_not_changed_either(path: Path) -> None:
    """The change would give it a new checksum."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE trajectories SET reward = 5 WHERE trajectory_id = 'g000007.0'")
    message = r"a row is not as it was written: g000007\.0 of trajectories; restore it"
    with closing(Ledger(path)) as ledger, pytest.raises(DamageError, match=message):
        ledger.note_trained(1, [], {"g000006.0": 1.0, "g000007.0": 1.0})
    assert isinstance(everything(path), DamageError)
    assert not LedgerReader(path).query("SELECT 1 FROM trajectories WHERE advantage = 1 AND trajectory_id > 'g000006'")


def test_a_text_that_is_none_is_damage_for_the_writer_too(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE trajectories SET warning = CAST(x'ff' AS TEXT) WHERE trajectory_id = 'g000007.0'")
    with closing(Ledger(path)) as ledger, pytest.raises(DamageError, match="its text is not UTF-8; restore it"):
        ledger.note_trained(1, [], {"g000007.0": 1.0})


def test_only_what_is_asked_for_is_proven(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE trajectories SET reward = 5 WHERE trajectory_id = 'g000007.0'")
    reader = LedgerReader(path)
    reader.prove("groups", "steps")
    assert reader.rows("trajectories", "WHERE trajectory_id = ?", "g000006.0")
    for table in ((), ("trajectories",)):
        with pytest.raises(DamageError, match=r"g000007\.0 of trajectories"):
            reader.prove(*table)
    with pytest.raises(DamageError, match=r"g000007\.0 of trajectories"):
        reader.rows("trajectories", "WHERE group_id = ?", "g000007")


def test_any_client_reads_and_writes_it(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*), sum(idx) FROM groups").fetchone() == (8, 28)
        [row] = connection.execute("SELECT * FROM files WHERE name = 'rollouts/g000000.parquet'")
        with connection:
            connection.execute("INSERT INTO files VALUES ('a', 'b', ?)", (row_checksum(["a", "b"]),))
    LedgerReader(path).prove()
    assert row[-1] == row_checksum(row[:-1])


def test_a_statement_that_is_wrong_is_no_damage(path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read: no such column: colour") as caught:
        LedgerReader(path).query("SELECT colour FROM groups")
    assert not isinstance(caught.value, DamageError)


@pytest.mark.parametrize("change", ["ADD COLUMN extra INTEGER", "RENAME COLUMN epoch TO round"])
def test_another_schema_is_refused(change: str, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"ALTER TABLE groups {change}")
    with pytest.raises(DamageError, match="is damaged: the definition of the table groups is not the one"):
        LedgerReader(path).prove()


def test_a_copy_is_a_ledger_like_it(path: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM INTO ?", (str(tmp_path / "vacuumed"),))
    with closing(Ledger(path)) as ledger:
        ledger.backup(tmp_path / "backup")
    shutil.copy(path, tmp_path / "copied")
    copies = [everything(tmp_path / name) for name in ("vacuumed", "backup", "copied")]
    assert all(copy == everything(path) for copy in copies)


def test_a_closed_ledger_is_one_file_that_a_read_only_disk_may_hold(path: Path) -> None:
    path.chmod(0o400)
    path.parent.chmod(0o500)
    try:
        LedgerReader(path).prove()
        assert list(path.parent.iterdir()) == [path]
    finally:
        path.parent.chmod(0o700)


def test_it_is_not_closed_while_another_thread_writes(tmp_path: Path) -> None:
    """SQLite has no guard of its own: a statement on a connection that is being closed ends the process."""
    ledger, begun, closed = Ledger(tmp_path / "ledger.sqlite"), threading.Event(), threading.Event()

    def write() -> None:
        with ledger.transaction() as db:
            begun.set()
            assert not closed.wait(0.1)
            db.execute("INSERT INTO files VALUES ('a', 'b', 0)")

    writing = threading.Thread(target=write)
    writing.start()
    begun.wait()
    ledger.close()
    closed.set()
    writing.join()
    assert [row["name"] for row in LedgerReader(tmp_path / "ledger.sqlite").query("SELECT * FROM files")] == ["a"]
