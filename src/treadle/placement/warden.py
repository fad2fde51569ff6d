"""`python -m treadle.placement.warden MARK`: ends and removes what a killed process has left on this machine.

It waits until its standard input closes, which happens however the process ends that started it. Then it removes
weights that were staged by processes which have ended: a rank of the learner starts one for its own.

A driver's also ends a local cluster, as Ray's agents outlive a driver that was killed by minutes. All processes of such
a cluster, and all that they start, inherit an environment variable with a mark. Those that have it are killed, and the
shared memory that they had is removed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from treadle.engines.temporary import is_running, remove_orphans
from treadle.engines.vllm.worker.treadle_launch import is_tracker, remove, shared_memory

VARIABLE = "TREADLE_LOCAL_CLUSTER"
_GRACE = 1.0  # seconds for processes to end by themselves, and to be waited for by who started them
_LIMIT = 10.0  # seconds to find all of them, and for them to end once they are killed


def start_warden(mark: str = "") -> subprocess.Popen[bytes]:
    """Start one, which acts once its standard input closes or this process ends; of processes it ends the marked."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, mark],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it
    )


@contextmanager
def warden(mark: str) -> Iterator[None]:
    """End the marked processes on leaving, and also if this process is killed before."""
    process = start_warden(mark)
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait()


def marked(mark: str) -> list[psutil.Process]:
    """Return this user's other processes that were started with the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(VARIABLE) == mark:
                found.append(process)
        except psutil.Error:  # it has ended, or is another user's
            continue
    return found


def _end(mark: str) -> None:
    found = marked(mark)
    memory = shared_memory(process.pid for process in found)
    time.sleep(_GRACE)
    stopped = _stop(mark)
    memory |= shared_memory(process.pid for process in stopped)
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + _LIMIT
    while any(is_running(process.pid) for process in (*found, *stopped)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in marked(mark):  # trackers that hang, and what was starting just then
        with suppress(psutil.NoSuchProcess):
            process.kill()
    remove(memory)
    remove_orphans(Path("/dev/shm"))
    remove_orphans(Path(tempfile.gettempdir()))


def _stop(mark: str) -> list[psutil.Process]:
    """Stop the marked processes until no new process appears, as each may start another; return them.

    Trackers go on: they end by themselves when the others have been killed.
    """
    stopped: list[psutil.Process] = []
    seen, deadline = {os.getpid()}, time.monotonic() + _LIMIT
    while (new := set(psutil.pids()) - seen) and time.monotonic() < deadline:
        seen |= new
        for pid in sorted(new, reverse=True):  # the youngest first: they may be the first to end
            with suppress(psutil.Error):  # it has ended, or is another user's
                process = psutil.Process(pid)
                if process.environ().get(VARIABLE) == mark and not is_tracker(pid):
                    process.suspend()
                    stopped.append(process)
    return stopped


if __name__ == "__main__":
    while os.read(0, 1024):
        pass
    _end(sys.argv[1])
