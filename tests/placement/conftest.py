import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from tests.runs import updates
from tests.until import wait_until
from tests.worlds import ROOT
from treadle.placement.reserve import Bundle, Reservation, Role, reserve
from treadle.placement.runtime import connected
from treadle.workers.reaper import SHARED, shared_memory

os.environ.setdefault("RAY_worker_niceness", "0")  # else they wait for the tests that run beside them, vLLM for minutes
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # before ray is imported
os.environ.setdefault("SPT_NOENV", "1")  # actors, which rename themselves, keep their environment in /proc
MARK = "TREADLE_TEST_CLUSTER"  # environment variable that all processes of the shared cluster inherit

ROLES: tuple[Role, ...] = ("learner rank", "engine", "rollout worker")
BUNDLES = [Bundle(role, number, {"CPU": 1}) for role in ROLES for number in range(2)]


class SharedCluster:
    """A local cluster, with six CPUs on any machine, which stays for the tests after: starting one takes long.

    While it is there, runs in this process are played on it.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        self.is_open = False

    def open(self) -> None:
        if not self.is_open:
            patch = self._opened.enter_context(pytest.MonkeyPatch.context())
            patch.setenv(MARK, uuid4().hex)
            self._opened.enter_context(connected(None, BUNDLES, lambda line: None))
            patch.setattr("treadle.placement.runtime.connected", self._connected)
            self.is_open = True

    def close(self) -> None:
        self.is_open = False
        self._opened.close()

    @contextmanager
    def _connected(self, address: str | None, bundles: Sequence[Bundle], log: Callable[[str], None]) -> Iterator[None]:
        assert address is None, "a process is connected to one cluster at a time; close the shared one first"
        yield


def inherited(variable: str, value: str) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Processes that have an environment variable, with their command lines."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value:
                yield process, process.cmdline()
        except psutil.Error:  # it has ended, or is another user's
            continue


def actors(title: str) -> list[psutil.Process]:
    """Processes of the shared cluster that are actors of a class: `actors("RankActor")`."""
    return [p for p, words in inherited(MARK, os.environ[MARK]) if (words or [""])[0].startswith(f"ray::{title}")]


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[SharedCluster]:
    shared = SharedCluster()
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def cluster(shared_cluster: SharedCluster) -> None:
    """Only slow tests start Ray: it gives its own processes 30 seconds, whatever else the machine does."""
    shared_cluster.open()


@pytest.fixture(scope="module")
def reservation(cluster: None) -> Iterator[Reservation]:
    with reserve(BUNDLES, 60) as reserved:
        yield reserved


DRIVER = """
import sys
from pathlib import Path
from tests.runs import start
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
    return [" ".join(words) for _, words in inherited("TREADLE_TEST", mark)]


def of_ray() -> set[str]:
    """Ray's files of shared memory, of any cluster."""
    return {name for name in os.listdir(SHARED) if name.startswith(("plasma", "ray"))}


def memory_of_test(mark: str) -> set[Path]:
    """Files of shared memory that the test's processes have mapped, or write weights to."""
    pids = [process.pid for process, _ in inherited("TREADLE_TEST", mark)]
    written = {name for name in os.listdir(SHARED) if name.startswith("treadle") and int(name.split("-")[-2]) in pids}
    return {Path(SHARED, name) for name in {*written, *shared_memory(pids)}}
