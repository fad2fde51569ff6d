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
from treadle.orchestration.store.run_directory import RunDirectory


@pytest.mark.slow
def test_the_engine_in_a_process_of_its_own_trains_the_same_weights(tmp_path: Path) -> None:
    here = start(tmp_path / "here")
    there = start(tmp_path / "there", "engine.own_process=true")
    assert there["weights_sha256"] == here["weights_sha256"]
    assert there["evaluations"] == here["evaluations"]
    check_finished(tmp_path / "there")
    assert (tmp_path / "there" / "engine.log").is_file()
    assert not children() and not staged()


class Striking(Quiet):
    """From a certain batch on, the engine's process answers nothing any more, and then is killed."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.after = batch

    def began(self, name: str) -> None:
        if name == "rollout" and len(self.rows) == self.after:
            [pid] = children()
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()


@pytest.mark.slow
@pytest.mark.parametrize(("max_staleness", "batch"), [(0, 0), (2, 3)])
def test_a_run_goes_on_when_its_engine_was_killed(max_staleness: int, batch: int, tmp_path: Path) -> None:
    """Even of the first batch every attempt is made again, though all fail at once. No checkpoint precedes the fourth,
    so that its attempts have only begun.
    """
    path, progress = tmp_path / "run", Striking(batch)
    options = ("engine.own_process=true", "orchestration.updates=8", f"orchestration.max_staleness={max_staleness}")
    start(path, *options, progress=progress)
    check_finished(path)
    said = [line for line in progress.lines if line.startswith("the engine ended")]
    assert said == ["the engine ended with code -9 (Killed); starting it again"]
    failed = query(path, "SELECT failure_cause AS cause FROM trajectories WHERE reward IS NULL")
    assert Counter(row["cause"] for row in failed).keys() == {"engine"}
    graded = query(
        path,
        "SELECT count(*) AS n FROM trajectories JOIN groups USING (group_id) WHERE trained_version IS NOT NULL AND "
        "reward IS NOT NULL GROUP BY group_id",
    )
    assert {row["n"] for row in graded} == {RunDirectory.open(path).config().training.group_size}
    assert not children() and not staged()
