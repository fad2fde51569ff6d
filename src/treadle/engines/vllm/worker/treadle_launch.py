"""Runs a command until it ends or standard input closes, then ends its whole process group. Standard library only.

The process that starts this holds the other end of standard input. However that process dies, the pipe closes with it,
and no server is left behind, nor the shared memory that its processes had. Must be the leader of its own process group.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

GRACE = 5.0  # seconds to end by themselves
LOOK = 0.1  # seconds between looks at whether it is time to end
TRACKER = "multiprocessing.resource_tracker"  # in the command of what removes semaphores, once all others have ended
FOLDER = "/dev/shm/"
MEMORY = ("psm_", "sem.mp-", "vllm_")  # how names of shared memory begin that Python and vLLM make


def members() -> list[int]:
    """Return the other processes of the group that have not ended; none where the system does not tell."""
    if not os.path.isdir("/proc"):
        return []
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid() and is_member(pid)]


def is_member(pid: int) -> bool:
    """Return whether the process is of the group and has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, _, group = file.read().rpartition(")")[2].split()[:3]
    except OSError:  # it has ended
        return False
    return int(group) == os.getpgrp() and state not in "ZX"


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the files of shared memory that these processes have mapped.

    They are told by their inodes: who made a semaphore has it mapped under another name.
    """
    mapped = set()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            mapped |= {int(line.split()[4]) for line in file if FOLDER in line}
    with suppress(FileNotFoundError), os.scandir(FOLDER) as files:
        return {file.path for file in files if file.name.startswith(MEMORY) and file.inode() in mapped}
    return set()


def remove(paths: Iterable[str]) -> None:
    """Remove files, those that are there."""
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)


def is_tracker(pid: int) -> bool:
    """Return whether the process tracks resources for Python's multiprocessing."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
        return TRACKER in file.read()
    return False


def end(child: "subprocess.Popen[bytes]", memory: set[str]) -> None:
    """Ask the group to end, wait for it, kill what is left, remove its shared memory; last of all, end."""
    memory |= shared_memory(members())
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while (child.poll() is None or members()) and time.monotonic() < deadline:
        time.sleep(LOOK / 2)
    while left := [pid for pid in members() if not is_tracker(pid)]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.poll()
        time.sleep(LOOK / 2)
    deadline = time.monotonic() + GRACE
    while members() and time.monotonic() < deadline:
        time.sleep(LOOK / 2)
    remove(memory)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run COMMAND, as in `treadle_launch.py COMMAND ...`, until it ends or standard input closes."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # not SIG_IGN, which the command would inherit
    signal.signal(signal.SIGINT, lambda number, frame: None)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    closed = threading.Event()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        closed.set()

    threading.Thread(target=watch, daemon=True).start()
    memory: set[str] = set()  # noted now and then: who maps it may end first
    looks = 0
    while child.poll() is None and not closed.wait(LOOK):
        looks += 1
        if looks % 100 == 0:
            memory |= shared_memory(members())
    if child.poll() is not None:
        print(f"the server ended with code {child.returncode}", file=sys.stderr, flush=True)
    end(child, memory)


if __name__ == "__main__":
    main()
