"""Runs in a process of their own, which can be killed, and what they leave."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.orchestration.runs import updates
from tests.until import wait_until
from tests.worlds import ROOT
from treadle.engines.staging import is_running
from treadle.engines.vllm.worker.treadle_launch import FOLDER, shared_memory

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
    def reached() -> bool:
        assert driver.poll() is None
        return (run / "metrics.jsonl").is_file() and len(updates(run)) >= count

    wait_until(reached)


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


def orphans(*kinds: str) -> set[str]:
    """Files of shared memory of these kinds that no process has any longer; of others, other tests leave some."""
    kept = {Path(path).name for path in shared_memory(psutil.pids())}
    left = {name for name in os.listdir(FOLDER) if name.startswith(kinds)} - kept
    return {name for name in left if not name.startswith("treadle") or not is_running(_writer(name))}


def _writer(name: str) -> int:
    """The process that staged weights under a name."""
    return int(name.split("-")[-2])
