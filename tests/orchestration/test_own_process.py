"""A run whose engine is in a process of its own."""

import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.engines.test_engine_restart import children, staged
from tests.orchestration.runs import check_finished, query, start
from tests.worlds import Quiet


def test_the_engine_in_a_process_of_its_own_trains_the_same_weights(tmp_path: Path) -> None:
    here = start(tmp_path / "here")
    there = start(tmp_path / "there", "engine.own_process=true")
    assert there["weights_sha256"] == here["weights_sha256"]
    assert there["evaluations"] == here["evaluations"]
    check_finished(tmp_path / "there")
    assert (tmp_path / "there" / "engine.log").is_file()
    assert not children() and not staged()


class Striking(Quiet):
    """From the third batch on, the engine's process answers nothing any more, and then is killed."""

    def phase(self, name: str, total: int) -> None:
        if name == "rollout" and len(self.rows) == 2:
            [pid] = children()
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_goes_on_when_its_engine_was_killed(max_staleness: int, tmp_path: Path) -> None:
    path, progress = tmp_path / "run", Striking()
    options = ("engine.own_process=true", "orchestration.updates=8", f"orchestration.max_staleness={max_staleness}")
    start(path, *options, progress=progress)
    check_finished(path)
    said = [line for line in progress.lines if line.startswith("the engine's process")]
    assert said == [
        f"the engine's process ended with code -9 (Killed), see {path / 'engine.log'}; starting it again",
        "the engine's process was started again",
    ]
    failed = query(path, "SELECT failure_cause AS cause FROM trajectories WHERE reward IS NULL")
    assert Counter(row["cause"] for row in failed).keys() == {"engine"}
    assert not children() and not staged()
