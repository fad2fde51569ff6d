"""`treadle top`: what a run does now, while it goes on, after it has ended, and where there is none."""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Trained
from tests.cli.worlds import treadle
from tests.orchestration.runs import start
from tests.until import wait_until
from tests.worlds import tiny
from treadle.cli.main import main
from treadle.orchestration.reporting.callbacks import Callback
from treadle.orchestration.setup.inputs import load_inputs
from treadle.orchestration.store.run_directory import RunDirectory


class Looks(Callback):
    """Looks at the run once it has made an update, as another process would."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys, self.out = path, capsys, ""

    def update(self, row: Mapping[str, Any]) -> None:
        if row["update"] == 2:
            written = json.loads((self.path / "status.json").read_text())["written"]
            wait_until(lambda: json.loads((self.path / "status.json").read_text())["written"] != written)
            self.capsys.readouterr()
            assert main(["top", str(self.path)]) == 0
            self.out = self.capsys.readouterr().out


@pytest.mark.quick(1)
def test_a_run_that_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    looks = Looks(path, capsys)
    inputs = load_inputs(tiny("orchestration.updates=3"))
    inputs.callbacks["looks"] = looks
    start(path, "orchestration.updates=3", inputs=inputs)
    lines = looks.out.splitlines()
    assert lines[0] == f"{path}: in progress, update 2 of 3"
    assert "versions: learner 2, published 2" in lines
    rows = {tuple(line.split()[:2]): line.split() for line in lines}
    assert rows["learner", "0"][2] == "0"
    assert rows["engine", "torch"][2:4] == ["0", "0"] and rows["engine", "torch"][-1] == "2"
    assert rows["rollout", "groups"][2:] == ["0", "0"] and rows["rollout", "attempts"][2:] == ["0"]
    assert rows["process", "of"][-1] == "MB" and rows["process", "of"][-3].endswith("%")


def test_a_run_that_has_finished(finished: Trained) -> None:
    done = treadle("top", finished.path)
    assert done.status == 0
    first, last = done.out.splitlines()
    assert first.endswith("run: finished, update 4 of 4")
    assert last.startswith("ended 20")


def test_a_run_that_was_killed_or_failed(finished: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", "lock"):
        (run / name).write_bytes((finished.path / name).read_bytes())
    status = json.loads((finished.path / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "phase": "update"}))
    assert "during update" in treadle("top", run).out
    (run / "status.json").write_text(json.dumps({**status, "error": "RankError: \x1b[2Jgone"}))
    out = treadle("top", run).out
    assert "RankError: " in out and "gone" in out and "\x1b" not in out


def test_one_of_an_earlier_version(finished: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes((finished.path / "config.yaml").read_bytes())
    assert "it has no status.json" in treadle("top", run).out


def test_ranks_lost_engines_silence_and_the_last_message(
    finished: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes, some of them elsewhere; one component that does nothing any more."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes((finished.path / "config.yaml").read_bytes())
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    nothing = dict.fromkeys(("process", "running", "waiting", "sessions", "cache", "version")) | {"error": ""}
    components = [
        {**nothing, "kind": "learner", "name": "0", "process": here, "running": 1},
        {**nothing, "kind": "learner", "name": "1", "process": {"host": "elsewhere", "pid": 1}, "running": 1},
        {**nothing, "kind": "engine", "name": "http://a", "sessions": 64, "running": 48, "waiting": 16, "cache": 0.875},
        {**nothing, "kind": "engine", "name": "http://b", "error": "it was killed"},
    ]
    status = json.loads((finished.path / "status.json").read_text())
    now = time.time()
    told = {"message": "task t, trajectory g0.1: gone", "message_at": now - 60, "written": now - 30}
    told |= {"phase": "rollout", "done": 3, "total": 64, "since": now - 90, "trained": 4, "published": 3}
    (run / "status.json").write_text(json.dumps({**status, **told, "process": here, "components": components}))
    monkeypatch.setattr(time, "time", lambda: now)
    holder = RunDirectory(run)
    holder.lock()
    try:
        out = treadle("top", run, "--once").out
    finally:
        holder.close()
    assert "versions: learner 4, published 3" in out
    assert "no status for 30 s, since rollout" in out
    assert "60 s ago: task t, trajectory g0.1: gone" in out
    assert "engine http://b: it was killed" in out
    [first, second] = [line.split() for line in out.splitlines() if line.startswith("learner")]
    assert first[-1] == "MB" and second == ["learner", "1", "1"]
    assert "88%" in out


def test_ctrl_c_ends_it_quietly(finished: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("treadle.cli.show.time.sleep", interrupt)
    done = treadle("top", finished.path)
    assert (done.status, done.out, done.err) == (0, "", "")
