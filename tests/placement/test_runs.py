"""Runs whose learner and engines are actors: the same bits twice, resumed ones, and what is left of killed ones."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from tests.orchestration.runs import check_finished, resume, start, updates
from tests.worlds import ROOT, Quiet, tiny

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SETTINGS = (
    "placement.kind=ray",
    "placement.learner.ranks=2",
    "placement.engines.count=2",
    "training.threads=1",
    "evaluation.every=0",
)


def test_the_same_seed_gives_the_same_bits_wherever_it_is_played_also_when_resumed(tmp_path: Path) -> None:
    progress = Quiet()
    workers = (*SETTINGS, "placement.rollout.workers=2")
    whole = start(tmp_path / "whole", *workers, "orchestration.updates=3", progress=progress)
    check_finished(tmp_path / "whole")
    assert any("placement: 6 processes on 1 node" in line for line in progress.lines), progress.lines
    assert start(tmp_path / "part", *SETTINGS, "orchestration.updates=1")["updates"] == 1
    parted = resume(tmp_path / "part", config=tiny(*SETTINGS, "orchestration.updates=3"))
    check_finished(tmp_path / "part")
    assert parted["weights_sha256"] == whole["weights_sha256"]
    losses = [[row["loss"] for row in updates(tmp_path / name)] for name in ("whole", "part")]
    assert losses[0] == losses[1]


def test_taking_turns_changes_no_bit(tmp_path: Path) -> None:
    settings = (*SETTINGS, "orchestration.updates=2", "evaluation.every=1")
    apart = start(tmp_path / "apart", *settings)
    colocated = start(tmp_path / "colocated", *settings, "placement.colocate=true")
    check_finished(tmp_path / "colocated")
    assert colocated["weights_sha256"] == apart["weights_sha256"]


DRIVER = """
import sys
from pathlib import Path
from tests.orchestration.runs import start
start(Path(sys.argv[1]), *sys.argv[2:])
"""


def of_test(mark: str) -> list[str]:
    """Command lines of the processes that inherited a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TREADLE_TEST") == mark:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_driver_that_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    mark, run = uuid4().hex, tmp_path / "run"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(run), *SETTINGS, "orchestration.updates=1000"],
        cwd=ROOT,
        env={**os.environ, "TREADLE_TEST": mark, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while not (run / "metrics.jsonl").is_file() or len(updates(run)) < 2:
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    assert len(of_test(mark)) > 4
    if how is signal.SIGINT:
        os.killpg(driver.pid, how)  # as a terminal does: all its processes
    else:
        driver.send_signal(how)
    assert driver.wait(60) == (0 if how is signal.SIGINT else -9)
    time.sleep(10)
    assert of_test(mark) == []
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(("plasma", "ray", "treadle"))]
    resumed = resume(run, config=tiny(*SETTINGS, f"orchestration.updates={len(updates(run)) + 1}"))
    assert not resumed["stopped_early"]
    check_finished(run)
