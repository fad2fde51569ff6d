"""Runs a command until it ends or standard input closes, then ends its whole process group. Standard library only.

The parent holds the other end of standard input. However it dies, the pipe closes, and neither servers nor their shared
memory are left behind. Must be the leader of its own process group.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

GRACE = 5.0  # seconds for processes to exit
LOOK = 0.1  # seconds between checks
# in the command of the process that removes semaphores after all others have ended
TRACKER = "multiprocessing.resource_tracker"
FOLDER = "/dev/shm/"
MEMORY = ("psm_", "sem.mp-", "vllm_")  # prefixes of shared memory made by Python and vLLM


def members() -> list[int]:
    """Return the other living processes of the group; none without /proc."""
    if not os.path.isdir("/proc"):
        return []
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid() and is_member(pid)]


def is_member(pid: int) -> bool:
    """Return whether the process is in the group and has not ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, _, group = file.read().rpartition(")")[2].split()[:3]
    except OSError:  # it has ended
        return False
    return int(group) == os.getpgrp() and state not in "ZX"


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the shared-memory files mapped by these processes, found by inode.

    The creator of a semaphore has it mapped under another name.
    """
    mapped = set()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            mapped |= {int(line.split()[4]) for line in file if FOLDER in line}
    with suppress(FileNotFoundError), os.scandir(FOLDER) as files:
        return {file.path for file in files if file.name.startswith(MEMORY) and file.inode() in mapped}
    return set()


def remove(paths: Iterable[str]) -> None:
    """Remove the files that exist."""
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)


def is_tracker(pid: int) -> bool:
    """Return whether the process is a resource tracker of Python's multiprocessing."""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
        return TRACKER in file.read()
    return False


def end(child: "subprocess.Popen[bytes]") -> None:
    """Ask the group to exit, kill the rest after a while, trackers last, and remove its shared memory; then exit."""
    memory = shared_memory(members())
    os.killpg(0, signal.SIGTERM)
    wait_for_members(child)
    while stubborn := [pid for pid in members() if not is_tracker(pid)]:
        for pid in stubborn:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.poll()
        time.sleep(LOOK / 2)
    wait_for_members(child)
    remove(memory)
    os.killpg(0, signal.SIGKILL)


def wait_for_members(child: "subprocess.Popen[bytes]") -> None:
    """Wait until all have ended, at most GRACE seconds."""
    deadline = time.monotonic() + GRACE
    while (child.poll() is None or members()) and time.monotonic() < deadline:
        time.sleep(LOOK / 2)


def main() -> None:
    """Run COMMAND, as in `treadle_launch.py COMMAND ...`, until it ends or standard input closes."""
    # SIG_IGN would be inherited by the command.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    while child.poll() is None:
        if select.select([0], [], [], LOOK)[0] and not os.read(0, 1024):
            break
    if child.poll() is not None:
        print(f"the server ended with code {child.returncode}", file=sys.stderr, flush=True)
    end(child)


if __name__ == "__main__":
    main()
