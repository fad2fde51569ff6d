"""Runs in a process of their own, which can be killed, and what they leave."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.orchestration.runs import updates
from tests.worlds import ROOT

DRIVER = """
import sys
from pathlib import Path
from tests.orchestration.runs import start
start(Path(sys.argv[1]), *sys.argv[2:])
"""


def start_driver(run: Path, mark: str, *settings: str) -> "subprocess.Popen[bytes]":
    """Start a run; all its processes inherit the mark."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(run), *settings],
        cwd=ROOT,
        env={**os.environ, "TREADLE_TEST": mark, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )


def wait_for_updates(driver: "subprocess.Popen[bytes]", run: Path, count: int) -> None:
    deadline = time.monotonic() + 600
    while not (run / "metrics.jsonl").is_file() or len(updates(run)) < count:
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)


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
