"""What the journal keeps, and for how long."""

import time
from pathlib import Path

import numpy as np
import pytest

from treadle.core.errors import RunError
from treadle.tinker.journal import Finished, Journal, Request

MODEL = "s0:train:0"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "tinker.sqlite")
    journal.add_session({})
    journal.add_model(MODEL, "s0", {}, 0, {})
    return journal


def request(seq: int, kind: str = "forward_backward") -> Request:
    return Request(f"{MODEL}:{seq}", kind, MODEL, seq, b"body")


def test_a_saved_state_frees_the_bodies_of_what_it_has_and_no_others(journal: Journal) -> None:
    """A server may be killed after it has saved the state of a request that is not finished yet."""
    for seq in (1, 2):
        assert journal.accept(request(seq))
    journal.finish(request(1), Finished(b"result", is_protobuf=True))
    assert [each.body for each in journal.applied(MODEL)] == [b"body"]
    journal.saved(MODEL, 2)
    assert journal.applied(MODEL) == []
    assert [(each.seq, each.body) for each in journal.open_requests()] == [(2, b"body")]
    assert journal.finished(f"{MODEL}:1") == Finished(b"result", is_protobuf=True)


def test_results_stay_until_they_were_read_and_a_day_otherwise(journal: Journal) -> None:
    for seq in (1, 2):
        journal.accept(request(seq))
        journal.finish(request(seq), Finished(b"result"))
    journal.note_read([f"{MODEL}:1"])
    journal.forget(time.time() + 1)
    with pytest.raises(KeyError):
        journal.finished(f"{MODEL}:1")
    assert journal.finished(f"{MODEL}:2") is not None
    assert not journal.accept(request(1))  # still known: it is not executed again
    journal.forget(time.time() + 86402)
    with pytest.raises(KeyError):
        journal.finished(f"{MODEL}:2")


def test_sequences_stay_while_their_session_lasts(journal: Journal) -> None:
    journal.add_sampler("s0:sample:0", "s0", None)
    sampled = Request("s0:sample:0:0", "sample", "s0:sample:0", 0, b"")
    journal.accept(sampled)
    prompt, tokens = np.array([1, 2], np.int32), np.array([3], np.int32)
    journal.finish(sampled, Finished(b"result"), sequences=[(prompt, tokens)])
    journal.forget(time.time() + 1)
    found = journal.sequence("s0:sample:0:0/0")
    assert found is not None and (found[0].tolist(), found[1].tolist()) == ([1, 2], [3])
    journal.end_session("s0", "success")
    journal.end_session("s0", "errored")
    journal.forget(time.time() + 1)
    assert journal.sequence("s0:sample:0:0/0") is None
    row = journal.row("SELECT ended FROM sessions")
    assert row is not None and row["ended"] == "success"


def test_a_file_of_another_version_is_refused(journal: Journal, tmp_path: Path) -> None:
    journal._db.execute("PRAGMA user_version=99")
    journal.close()
    with pytest.raises(RunError, match="written by another version of Treadle; choose another run directory"):
        Journal(tmp_path / "tinker.sqlite")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tinker.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(RunError, match="could not be used: file is not a database"):
        Journal(tmp_path / "tinker.sqlite")
