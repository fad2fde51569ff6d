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
from contextlib import contextmanager
from pathlib import Path

import psutil

from treadle.engines.temporary import is_running, remove_orphans
from treadle.engines.vllm.worker.treadle_launch import is_tracker, remove, shared_memory

VARIABLE = "TREADLE_LOCAL_CLUSTER"
_GRACE = 1.0  # seconds for processes to end by themselves, and to be waited for by who started them
_ROUNDS = 5  # one may start another while it is found


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
    found = {process.pid for process in marked(mark)}
    memory = shared_memory(found)
    time.sleep(_GRACE)
    for _ in range(_ROUNDS):
        left = marked(mark)
        found |= {process.pid for process in left}
        memory |= shared_memory(process.pid for process in left)
        for process in [each for each in left if not is_tracker(each.pid)] or left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if not left:
            break
        psutil.wait_procs(left, timeout=1)
    deadline = time.monotonic() + _GRACE * _ROUNDS
    while any(map(is_running, found)) and time.monotonic() < deadline:  # a process that frees its memory has no mark
        time.sleep(0.05)
    remove(memory)
    remove_orphans(Path("/dev/shm"))
    remove_orphans(Path(tempfile.gettempdir()))


if __name__ == "__main__":
    while os.read(0, 1024):
        pass
    _end(sys.argv[1])
