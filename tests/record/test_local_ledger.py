"""A ledger on the driver's own disk: found again, replaced by its copy where it is gone or out of date."""

import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.loop.killed_runs import in_child
from tests.runs import check_finished, query, resume, start
from tests.worlds import tiny
from treadle.core.errors import DamageError
from treadle.core.files import WrittenFile
from treadle.plan.inputs import load_inputs
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import LedgerReader, LoopState
from treadle.record.run_directory import RunDirectory
from treadle.record.run_store import local_file, open_ledger, recover_ledger
from treadle.report.callback import Callback


class Killed(Callback):
    """Kills the process after an update, as SIGKILL does."""

    def __init__(self, update: int) -> None:
        self._update = update

    def update(self, row: Mapping[str, Any]) -> None:
        if row["update"] == self._update:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "shared" / "run")
    made.path.mkdir(parents=True)
    return made


def names(ledger: LedgerReader) -> set[str]:
    return {row["name"] for row in ledger.query("SELECT name FROM files")} - {"ledger.sqlite", "ledger-before.sqlite"}


def note(ledger: Ledger, name: str) -> None:
    ledger.note_files([WrittenFile(name, "0" * 64)])


def killed(run: RunDirectory, local: str, *files: str) -> None:
    """What a process that was killed leaves: the last of the files is in no copy."""
    with suppress(KeyboardInterrupt), open_ledger(run, local) as ledger:
        for name in files[:-1]:
            note(ledger, name)
        ledger.copy_out()
        note(ledger, files[-1])
        keep = local_file(run, local).with_name("kept")
        ledger.backup(keep)
        shared = run.ledger_file.read_bytes()
        raise KeyboardInterrupt
    run.ledger_file.write_bytes(shared)
    keep.replace(local_file(run, local))


def test_readers_have_the_last_copy_and_at_the_end_everything(run: RunDirectory, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    with open_ledger(run, local) as ledger:
        note(ledger, "a")
        ledger.commit_checkpoint("step-000000", LoopState())
        ledger.copy_out()
        note(ledger, "b")
        reader = run.ledger()
        reader.prove()
        assert names(reader) == {"a"}
        assert reader.latest_checkpoint() is not None
    assert list(Path(local).iterdir()) == []
    reader = run.ledger()
    assert names(reader) == {"a", "b"}
    assert list(run.path.iterdir()) == [run.ledger_file]  # no WAL, nothing temporary
    with open_ledger(run, local) as ledger:
        assert names(ledger) == {"a", "b"}


def test_what_a_killed_process_left_is_found(run: RunDirectory, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    killed(run, local, "a", "b")
    recover_ledger(run, local)
    reader = run.ledger()
    assert names(reader) == {"a", "b"}
    killed(run, local, "c")  # in no copy of its own but the first
    recover_ledger(run, local)
    with open_ledger(run, None) as ledger:  # the setting may be changed
        assert names(ledger) == {"a", "b", "c"}


def test_the_copy_is_used_where_the_disk_is_gone(run: RunDirectory, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    killed(run, local, "a", "b")
    shutil.rmtree(local)
    recover_ledger(run, local)
    with open_ledger(run, local) as ledger:
        assert names(ledger) == {"a"}


def test_the_copy_is_used_where_the_run_went_on_elsewhere(run: RunDirectory, tmp_path: Path) -> None:
    here, elsewhere = str(tmp_path / "here"), str(tmp_path / "elsewhere")
    killed(run, here, "a", "b")
    with open_ledger(run, elsewhere) as ledger:
        note(ledger, "c")
    recover_ledger(run, here)
    assert list(Path(here).iterdir()) == []
    reader = run.ledger()
    assert names(reader) == {"a", "c"}


def test_a_damaged_one_is_named_with_the_remedy(run: RunDirectory, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    killed(run, local, "a", "b")
    local_file(run, local).write_bytes(b"no database" * 1000)
    with pytest.raises(DamageError, match="remove it: the run then continues with its copy"):
        recover_ledger(run, local)


@pytest.mark.slow
@pytest.mark.parametrize("disk_is_gone", [False, True])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_killed_run_goes_on(disk_is_gone: bool, staleness: int, tmp_path: Path) -> None:
    """To the weights of a run that was never killed, where that is synchronous; and everything is accounted for."""
    local, run = tmp_path / "local", tmp_path / "run"
    options = (
        "orchestration.updates=6",
        "orchestration.checkpoint_every=2",
        f"orchestration.max_staleness={staleness}",
    )
    here = (*options, f"orchestration.ledger_directory={local}")

    def begin() -> None:
        inputs = load_inputs(tiny(*here))
        inputs.callbacks["killed"] = Killed(5)
        start(run, *here, inputs=inputs)

    assert in_child(begin) == -signal.SIGKILL
    assert any(local.iterdir())
    if disk_is_gone:
        shutil.rmtree(local)
    summary = resume(run)
    check_finished(run)
    assert list(local.iterdir()) == []
    assert not query(run, "SELECT * FROM steps WHERE state = 'recorded'")
    if staleness == 0:
        assert summary["weights_sha256"] == start(tmp_path / "straight", *options)["weights_sha256"]
