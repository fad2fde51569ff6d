"""`python -m treadle.placement.warden MARK`: ends what a killed process has left of its local cluster.

Ray's agents outlive a driver that was killed by minutes. All processes of a local cluster, and all that they start,
inherit an environment variable with a mark. This process waits until its standard input closes, which happens however
the driver ends, and then kills those that have the mark, and removes the shared memory that they had.
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

from treadle.engines.temporary import remove_orphans
from treadle.engines.vllm.worker.treadle_launch import is_tracker, remove, shared_memory

VARIABLE = "TREADLE_LOCAL_CLUSTER"
_GRACE = 1.0  # seconds for processes to end by themselves
_ROUNDS = 5  # one may start another while it is found


@contextmanager
def warden(mark: str) -> Iterator[None]:
    """End the marked processes on leaving, and also if this process is killed before."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, mark],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it
    )
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
    memory = shared_memory(process.pid for process in marked(mark))
    time.sleep(_GRACE)
    for _ in range(_ROUNDS):
        left = marked(mark)
        memory |= shared_memory(process.pid for process in left)
        for process in [each for each in left if not is_tracker(each.pid)] or left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if not left:
            break
        psutil.wait_procs(left, timeout=1)
    remove(memory)
    remove_orphans(Path("/dev/shm"))
    remove_orphans(Path(tempfile.gettempdir()))


if __name__ == "__main__":
    while os.read(0, 1024):
        pass
    _end(sys.argv[1])
