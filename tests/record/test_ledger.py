"""Every recorded step is in exactly one state, through recording, checkpoints and roll-backs."""

import random
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worlds import make_group, make_step
from treadle.core.errors import Cause, DamageError, RunError
from treadle.core.files import WrittenFile
from treadle.core.outcomes import DroppedStep, dropped_steps, leave_out
from treadle.core.types import DropReason, Failure, Group, Status, Step, Trajectory
from treadle.record.ledger import Ledger, TrainedBatch
from treadle.record.ledger_reader import LedgerReader, LoopState
from treadle.record.tables import journal_mode


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def good(name: str, attempt: int = 0, reward: float = 1.0, steps: tuple[Step, ...] = ()) -> Trajectory:
    return Trajectory(f"{name}.{attempt}", "t", attempt, steps or (make_step(),), reward, Status.DONE, seconds=0.5)


def failed(name: str, attempt: int = 0, cause: Cause = Cause.TIMEOUT) -> Trajectory:
    failure = Failure(cause, "too slow")
    return Trajectory(f"{name}.{attempt}", "t", attempt, (make_step(), make_step()), None, Status.FAILED, failure)


def group(index: int, name: str = "") -> Group:
    """One graded trajectory of one step, one that failed after two."""
    name = name or f"g{index:06d}"
    return make_group(index, good(name, 0), failed(name, 1), name=name)


def shard(name: str) -> WrittenFile:
    return WrittenFile(name, "0" * 64)


def states(ledger: LedgerReader) -> dict[str, tuple[str, str | None]]:
    """Trajectory -> the state and reason that all of its steps share."""
    rows = ledger.query("SELECT DISTINCT trajectory_id, state, reason FROM steps ORDER BY trajectory_id")
    found = {row["trajectory_id"]: (row["state"], row["reason"]) for row in rows}
    assert len(found) == len(rows)
    return found


def test_steps_that_were_dropped_when_recorded_stay_so(ledger: Ledger) -> None:
    steps = (make_step(), replace(make_step(), dropped=DropReason.CANCELLED))
    ledger.record([make_group(0, good("g000000", steps=steps))], "train", 0, shard("s"))
    ledger.record([make_group(1, good("g000001", steps=steps), name="e")], "eval", 0, shard("s"))
    ledger.commit_checkpoint("c", LoopState(update=1, cursor=2))
    rows = ledger.query("SELECT state, reason FROM steps ORDER BY trajectory_id, step")
    kept = [(row["state"], row["reason"]) for row in rows]
    assert kept == [("trained", None), ("dropped", "cancelled"), ("evaluated", None), ("dropped", "cancelled")]


def test_states_of_a_batch_from_recording_to_checkpoint(ledger: Ledger) -> None:
    ledger.record([group(0), group(1)], "train", 0, shard("s"))
    ledger.record([group(0, "e000000-0000")], "held_out", 0, shard("e"))
    dropped, evaluated = ("dropped", "failed"), ("evaluated", None)
    assert states(ledger) == {
        "e000000-0000.0": evaluated,
        "e000000-0000.1": evaluated,
        "g000000.0": ("recorded", None),
        "g000000.1": dropped,
        "g000001.0": ("recorded", None),
        "g000001.1": dropped,
    }
    ledger.commit_checkpoint("step-000001", LoopState(update=1, cursor=1))
    assert states(ledger)["g000000.0"] == ("trained", None)
    assert states(ledger)["g000001.0"] == ("recorded", None)
    assert ledger.roll_back(LoopState(cursor=1), DropReason.RESAMPLED) == 1
    assert states(ledger)["g000001.0"] == ("dropped", "resampled")
    ledger.record([group(1, "g000001r1")], "train", 0, shard("s2"))
    ledger.commit_checkpoint("step-000002", LoopState(update=2, cursor=2))
    assert states(ledger)["g000001r1.0"] == ("trained", None)
    assert states(ledger)["g000001.0"] == ("dropped", "resampled")  # not trained with its namesake
    assert states(ledger)["e000000-0000.0"] == evaluated


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["batch", "checkpoint", "kill", "evaluate"]), max_size=20), st.integers(1, 3))
def test_conservation_through_any_history(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], size: int
) -> None:
    """A model of the run beside the ledger: what is trained is exactly what the latest checkpoint contains."""
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "ledger.sqlite")
    saved = now = LoopState()
    expected: dict[str, tuple[str, str | None]] = {}
    pending: list[str] = []
    for number, event in enumerate(events):
        if event == "batch":
            again = ledger.times_sampled()
            names = {
                i: f"g{i:06d}" + (f"r{again[i]}" if i in again else "") for i in range(now.cursor, now.cursor + size)
            }
            ledger.record([group(i, name) for i, name in names.items()], "train", now.version, shard(f"shard{number}"))
            pending += [f"{name}.0" for name in names.values()]
            expected |= {f"{name}.1": ("dropped", "failed") for name in names.values()}
            now = LoopState(now.update + 1, now.version + 1, now.cursor + size)
        elif event == "evaluate":
            ledger.record([group(0, f"e{number}")], "held_out", now.update, shard(f"shard{number}"))
            expected |= {f"e{number}.{attempt}": ("evaluated", None) for attempt in range(2)}
        elif event == "checkpoint":
            ledger.commit_checkpoint(f"step-{now.update}", now)
            expected |= dict.fromkeys(pending, ("trained", None))
            saved, pending = now, []
        else:
            assert ledger.roll_back(saved, DropReason.RESAMPLED) == len(pending)
            expected |= dict.fromkeys(pending, ("dropped", "resampled"))
            now, pending = saved, []
        assert states(ledger) == expected | dict.fromkeys(pending, ("recorded", None))
    ledger.prove()
    ledger.close()


def test_what_a_batch_was_is_on_record_with_its_checkpoint_and_what_is_left_at_the_end_is_unused(
    ledger: Ledger,
) -> None:
    """Until then nothing is: after a kill, steps that had become too old may be trained by an earlier version."""
    ledger.record(
        [make_group(0, good("g000000", steps=(make_step(), make_step()))), group(1), group(2)], "train", 0, shard("s")
    )
    ledger.note_trained(3, ["g000000"], {})
    batch = TrainedBatch((DroppedStep("g000000.0", 1, DropReason.STALE),))
    ledger.commit_checkpoint("a", LoopState(1, 1, 2, outstanding=(1,)), [batch])
    rows = ledger.query("SELECT state, reason FROM steps WHERE trajectory_id = 'g000000.0' ORDER BY step")
    assert [tuple(row.values()) for row in rows] == [("trained", None), ("dropped", "stale")]
    versions = ledger.query("SELECT trained_version FROM groups ORDER BY idx")
    assert [row["trained_version"] for row in versions] == [3, None, None]
    ledger.record([group(0, "e0")], "held_out", 0, shard("e"))
    ledger.commit_checkpoint("b", LoopState(1, 1, 2, outstanding=(1,)), finished=True)
    left = ledger.query("SELECT DISTINCT trajectory_id, state, reason FROM steps WHERE trajectory_id GLOB '[ge]*.0'")
    assert {tuple(row.values()) for row in left} == {
        ("g000000.0", "trained", None),
        ("g000000.0", "dropped", "stale"),
        ("g000001.0", "dropped", "unused"),
        ("g000002.0", "dropped", "unused"),
        ("e0.0", "evaluated", None),
    }


@pytest.mark.parametrize(
    ("where", "expected"),
    [("local", "WAL"), ("share/runs", "DELETE"), ("share/disk", "WAL"), ("two words/x", "DELETE"), ("fuse", "DELETE")],
)
def test_the_journal_is_one_that_the_filesystem_can_keep(where: str, expected: str, tmp_path: Path) -> None:
    kinds = {"": "ext4", "/share": "nfs4", "/share/disk": "xfs", "/two\\040words": "cifs", "/fuse": "fuse.sshfs"}
    table = "".join(f"device {tmp_path}{folder} {kind} rw 0 0\n" for folder, kind in kinds.items())
    (tmp_path / "mounts").write_text(table)
    assert journal_mode(tmp_path / where / "ledger.sqlite", tmp_path / "mounts") == expected
    assert journal_mode(tmp_path / where / "ledger.sqlite", tmp_path / "none") == "WAL"


def test_the_latest_checkpoint_is_the_last_one_committed(ledger: Ledger) -> None:
    assert ledger.latest_checkpoint() is None
    evaluations = ({"update": 0, "success": 0.25, "by": {"1": 0.5}},)
    state = LoopState(4, 2, 8, 12.5, 20.0, evaluations)
    ledger.commit_checkpoint("step-000004", LoopState(update=4))
    ledger.commit_checkpoint("step-000004", state)
    assert ledger.latest_checkpoint() == ("step-000004", state)
    ledger.commit_checkpoint("step-000002", LoopState(update=2))
    assert ledger.latest_checkpoint() == ("step-000002", LoopState(update=2))


def test_a_trained_batch_is_on_record_at_once_until_it_is_rolled_back(ledger: Ledger) -> None:
    ledger.record([group(0), group(1)], "train", 0, shard("s"))
    ledger.note_trained(0, ["g000000"], {"g000000.0": -0.5})
    ledger.commit_checkpoint("a", LoopState(1, 1, 1))
    ledger.note_trained(1, ["g000001"], {})
    versions = "SELECT trained_version FROM groups ORDER BY idx"
    assert [row["trained_version"] for row in ledger.query(versions)] == [0, 1]
    ledger.roll_back(LoopState(1, 1, 1), DropReason.ROLLED_BACK, keep=["g000001"])
    assert [row["trained_version"] for row in ledger.query(versions)] == [0, None]


def test_refused_trajectories_say_why_and_are_dropped_with_the_checkpoint(ledger: Ledger) -> None:
    """What was dropped before keeps its own reason."""
    steps = (make_step(), replace(make_step(), dropped=DropReason.CANCELLED))
    groups = [group(0), make_group(1, good("g000001", steps=steps))]
    ledger.record(groups, "train", 0, shard("shard"))
    ledger.note_refused({"g000001.0": "task t, trajectory g000001.0, step 0: too long"})
    [row] = ledger.query("SELECT warning FROM trajectories WHERE trajectory_id = 'g000001.0'")
    assert row["warning"].endswith("step 0: too long")
    assert len(ledger.query("SELECT 1 FROM steps WHERE state = 'recorded'")) == 2
    marked = [leave_out(each, DropReason.REFUSED, {"g000001.0"}) for each in groups]
    batch = TrainedBatch(tuple(dropped_steps(marked)))
    ledger.commit_checkpoint("step-1", LoopState(1, 1, 2), [batch])
    rows = ledger.query("SELECT state, reason FROM steps WHERE trajectory_id = 'g000001.0' ORDER BY step")
    assert [tuple(row.values()) for row in rows] == [("dropped", "refused"), ("dropped", "cancelled")]
    assert len(ledger.query("SELECT 1 FROM steps WHERE state = 'trained' AND trajectory_id = 'g000000.0'")) == 1


def test_recording_is_all_or_nothing(ledger: Ledger) -> None:
    ledger.record([group(1)], "train", 0, shard("s"))
    with pytest.raises(sqlite3.IntegrityError):
        ledger.record([group(0), group(1)], "train", 0, shard("s"))  # a group twice is a bug, and leaves nothing behind
    assert ledger.times_sampled() == {1: 1}


@pytest.mark.parametrize("folder", ["plain", "50% off #1?"])
def test_a_reader_sees_a_run_in_progress_and_cannot_change_it(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "ledger.sqlite"
    path.parent.mkdir()
    writer = Ledger(path)
    writer.record([group(0)], "train", 0, shard("s"))
    reader = LedgerReader(path)
    writer.commit_checkpoint("step-000001", LoopState(update=1, cursor=1))
    assert states(reader)["g000000.0"] == ("trained", None)
    with pytest.raises(RunError, match="readonly"):
        reader.query("DELETE FROM steps")
    writer.close()


def test_reading_a_missing_ledger_is_an_error_and_makes_none(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no ledger at"):
        LedgerReader(tmp_path / "ledger.sqlite").checkpoint_names()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_a_run_error(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(RunError, match="ledger"):
        Ledger(tmp_path / "ledger.sqlite")
    (tmp_path / "no").write_text("this is no database, and long enough for SQLite to notice that it is none")
    with pytest.raises(RunError, match="no is damaged: file is not a database"):
        Ledger(tmp_path / "no")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        for index in range(8):
            name = f"g{index:06d}"
            attempts = [good(name, 0, -0.0, (make_step(), make_step())), failed(name, 1), good(name, 2)]
            ledger.record([make_group(index, *attempts, name=name)], "train", 0, shard(f"{name}.parquet"))
        ledger.note_trained(0, ["g000000", "g000001"], {"g000000.0": -0.5, "g000001.2": 1})
        ledger.commit_checkpoint("step-000001", LoopState(1, 1, 3), manifest_sha256="1" * 64)
    return tmp_path / "ledger.sqlite"


def everything(path: Path) -> Any:
    """All rows; or, where that is refused, the error."""
    try:
        reader = LedgerReader(path, "do this")
        reader.prove()
        tables = ("groups", "trajectories", "steps", "checkpoints", "files")
        return [reader.query(f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables]
    except RunError as error:
        assert "\n" not in str(error) and str(error).endswith("; do this")
        return error


def test_a_database_that_is_damaged_is_refused(path: Path) -> None:
    """Wherever a part of a page is lost, SQLite notices; single values are not compared."""
    good, seen = path.read_bytes(), 0
    for start in range(0, len(good), 4096):
        path.write_bytes(good[:start] + bytes(8) + good[start + 8 :])
        found = everything(path)
        assert isinstance(found, DamageError), (start, found)
        path.write_bytes(good[: start + 100])
        seen += isinstance(everything(path), DamageError)
    assert seen == len(good) // 4096


def test_whatever_byte_is_flipped_the_ledger_is_read_or_refused(path: Path) -> None:
    content, draws = path.read_bytes(), random.Random(0)
    for _ in range(200):
        flipped = bytearray(content)
        flipped[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        path.write_bytes(flipped)
        everything(path)


def test_a_statement_that_is_wrong_is_no_damage(path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read: no such column: colour") as caught:
        LedgerReader(path).query("SELECT colour FROM groups")
    assert not isinstance(caught.value, DamageError)


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
            db.execute("INSERT INTO files VALUES ('a', 'b')")

    writing = threading.Thread(target=write)
    writing.start()
    begun.wait()
    ledger.close()
    closed.set()
    writing.join()
    assert [row["name"] for row in LedgerReader(tmp_path / "ledger.sqlite").query("SELECT * FROM files")] == ["a"]
