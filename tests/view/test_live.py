"""What a run does now, or how it ended, as its status.json says."""

import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.view.conftest import asking
from treadle.core.engine import ProcessId
from treadle.record.run_directory import RunDirectory
from treadle.report.status import LiveStatus, RunStatus
from treadle.view.recorded_run import RecordedRun

STATUS = RunStatus(
    ProcessId.own(), written=1000.0, update=4, updates=10, phase="rollout", done=12, total=64, since=992.0
)
STOP = "KeyboardInterrupt"
WARMING = replace(STATUS, done=5, total=20, phase="warm start")


@pytest.mark.parametrize(
    ("status", "state", "doing", "left"),
    [
        (STATUS, "in progress", "rollout 12/64 for 9 s", "about 36 s left"),
        (WARMING, "in progress", "warm start 5/20 for 9 s", "about 24 s left of it"),
        (replace(STATUS, total=0), "in progress", "rollout for 9 s", "about 36 s left"),
        (replace(STATUS, written=900.0), "in progress", "no status for 2 min, since rollout: the process may be", None),
        (replace(STATUS, error="RunError: disk full"), "stopped", "RunError: disk full", ""),
        (STATUS, "stopped", "during rollout; resume with: treadle train", ""),
        (replace(STATUS, interrupted=True), "stopped", "after update 4 of 10; resume with: treadle train", ""),
        (replace(STATUS, error=STOP), "stopped", "during rollout; resume with: treadle train", ""),
        (replace(STATUS, interrupted=True), "finished", "ended 1970", ""),
    ],
)  # fmt: skip
def test_it_is_said_in_words(
    status: RunStatus, state: str, doing: str, left: str | None, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(recorded, "recorded")
    monkeypatch.setattr(RunStatus, "read", lambda path: status)
    monkeypatch.setattr(RunDirectory, "state", lambda self: state)
    monkeypatch.setattr(RunDirectory, "has_checkpoint", True)
    monkeypatch.setattr(time, "time", lambda: 1001.0)
    now = run.now()
    assert doing in now["doing"] and left in (now["left"], None)
    by_a_person = status.interrupted or status.error == STOP
    assert now["doing"].startswith("interrupted") == (state == "stopped" and by_a_person)
    assert now["has_failed"] == (status.error == "RunError: disk full")


def test_a_publication_begins_when_the_update_has_ended(tmp_path: Path) -> None:
    live, file = LiveStatus(), tmp_path / "status.json"
    live.publish(3)
    live.phase("update", 0, 1)
    ended = time.time()
    with live.writing(file):
        live.interval({"phase": "update"})
    status = RunStatus.read(file)
    assert status is not None and (status.phase, status.trained, status.published) == ("publish", 4, 3)
    assert status.since >= ended


def test_the_pages_are_told_what_a_run_does(recorded: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(recorded, tmp_path / "a folder" / "run"))
    get = asking(run)
    nothing = {"state": "stopped", "doing": "", "left": "", "message": "", "has_failed": False}
    assert get("changes")["runs"]["run"]["now"] == nothing
    status = replace(STATUS, error=STOP, written=time.time())
    (run / "status.json").write_text(json.dumps(asdict(status)))
    doing = get("changes")["runs"]["run"]["now"]["doing"]
    assert doing.startswith("interrupted ") and doing.endswith(", during rollout; there is no checkpoint to resume")
    (run / "checkpoints" / "step-000001").mkdir()
    doing = get("changes")["runs"]["run"]["now"]["doing"]
    assert doing.endswith(f"; resume with: treadle train '{run}' --resume")
    (run / "status.json").write_text('{"of another version": 1}')
    assert get("changes")["runs"]["run"]["now"]["doing"] == ""


def test_a_run_without_updates_says_why(recorded: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    assert asking(run)("runs/run")["no_update"] == ""
    (run / "metrics.jsonl").write_bytes(b"rubbish\n")
    assert "damaged lines: 1" in asking(run)("runs/run")["no_update"]
    (run / "metrics.jsonl").unlink()
    assert "there is a checkpoint of update 1" in asking(run)("runs/run")["no_update"]
    (run / "ledger.sqlite").write_bytes(b"rubbish" * 1000)
    detail = asking(run)("runs/run")
    assert detail["no_update"] == "The run was stopped before its first update."
    (run / "ledger.sqlite").unlink()
    [problem] = asking(run)("runs/run")["problems"]
    assert problem == "nothing was recorded before the run was stopped: the run has no ledger"
    (run / "checkpoints" / "step-000001").mkdir()
    assert "has no ledger any more; restore it" in asking(run)("runs/run")["problems"][0]
