"""`python reaper.py`: runs a program and kills all processes it started.

Standard input: the order, one line of JSON (`program.Program`). When the caller closes it, or is killed, the program is
terminated, then killed. Standard output: the result as JSON, once no process of the program is left.

On Linux it is a subreaper: processes started by the program, in any process group or session, become its children when
their own parent ends, and can be found and killed. Elsewhere only the program's own group is killed.

Standard library only, to start fast.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

TAIL = 2**16  # bytes kept of each output
GRACE = 2.0  # default seconds between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PROCESSES = Path("/proc")
_CHILDREN = _PROCESSES / "thread-self" / "children"
_TRACKER = b"multiprocessing.resource_tracker"  # in the command of what removes semaphores once all others have ended
_TRACKING = 5.0  # seconds that it has for this
SHARED = Path("/dev/shm")
_PREFIXES = ("psm_", "sem.mp-", "vllm_")  # of shared memory that Python and vLLM make


def main() -> None:
    line = sys.stdin.buffer.readline()
    if line.endswith(b"\n"):  # otherwise the caller has ended
        result = json.dumps(run(json.loads(line))).encode()
        with suppress(BrokenPipeError):
            os.write(1, result)


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Return status (as in `subprocess`), stdout and stderr (their last TAIL bytes); or error, if it cannot start."""
    ended, wakeup = os.pipe()  # readable once a child has ended
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    # Elsewhere it could not find adopted children.
    if _CHILDREN.exists():
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    log: int | None = order["log"]
    try:
        program = subprocess.Popen(
            order["words"],
            env=order["environment"],
            cwd=order["directory"],
            stdin=subprocess.DEVNULL if order["stdin"] is None else order["stdin"],
            stdout=subprocess.PIPE if log is None else log,
            stderr=subprocess.PIPE if log is None else log,
            start_new_session=True,
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # if the supervisor is killed
        )
    except (OSError, ValueError) as error:
        return {"error": str(error)}
    outputs = [output.fileno() for output in (program.stdout, program.stderr) if output is not None]
    tails = dict.fromkeys(outputs, b"")
    for output in tails:
        os.set_blocking(output, False)
    memory = _watch(program, ended, tails, order["grace"], order["shared_memory"])
    if log is not None and program.returncode is not None:
        os.write(log, f"the program ended with code {program.returncode}\n".encode())
    if order["shared_memory"]:
        memory |= shared_memory(descendants(os.getpid()))
    _kill(program)
    for path in memory:
        with suppress(FileNotFoundError):
            os.unlink(path)
    for output in tails:
        while _read(output, tails):
            pass
    stdout, stderr = (tail.decode(errors="replace") for tail in tails.values() or (b"", b""))
    return {"status": program.returncode, "stdout": stdout, "stderr": stderr}


def _watch(
    program: "subprocess.Popen[bytes]", ended: int, tails: dict[int, bytes], grace: float, has_memory: bool
) -> set[str]:
    """Read the program's outputs until it has ended, or until `grace` seconds after its termination request.

    has_memory: return the files of shared memory that its processes have at that request.
    """
    deadline: float | None = None
    memory = set[str]()
    with selectors.DefaultSelector() as selector:
        for source in (0, ended, *tails):
            selector.register(source, selectors.EVENT_READ)
        while program.returncode is None:
            timeout = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                break
            for key, _ in selector.select(timeout):
                if key.fd == ended:
                    os.read(ended, 4096)
                    _reap(program)
                elif key.fd in tails:
                    if _read(key.fd, tails) == b"":
                        selector.unregister(key.fd)
                elif not os.read(0, 4096):  # the other end is closed
                    selector.unregister(0)
                    memory = shared_memory(descendants(os.getpid())) if has_memory else memory
                    deadline = time.monotonic() + grace
                    with suppress(ProcessLookupError):  # it has just ended
                        os.killpg(program.pid, signal.SIGTERM)
    return memory


def _read(output: int, tails: dict[int, bytes]) -> bytes | None:
    """Read available output and keep its end. Returns None if there is nothing yet, b"" at its end."""
    try:
        data = os.read(output, TAIL)
    except BlockingIOError:
        return None
    tails[output] = (tails[output] + data)[-TAIL:]
    return data


def _kill(program: "subprocess.Popen[bytes]") -> None:
    """Kill all children until there are none: a killed one's children become ours. Trackers come last.

    Processes of another user (sudo) cannot be killed.
    """
    if not _CHILDREN.exists():
        with suppress(ProcessLookupError, PermissionError):  # it has ended; on macOS, its processes are zombies
            os.killpg(program.pid, signal.SIGKILL)
    deadline = time.monotonic() + _TRACKING
    while _reap(program):
        children = _children()
        others = [child for child in children if not _is_tracker(child)]
        doomed = children if time.monotonic() > deadline else others
        if doomed and not any([_kill_child(child) for child in doomed]):  # not a generator: kill all of them
            return
        time.sleep(0.001)


def _kill_child(child: int) -> bool:
    """Kill a child if permitted. A child keeps its number until it is reaped."""
    try:
        os.kill(child, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _reap(program: "subprocess.Popen[bytes]") -> bool:
    """Reap ended children, including adopted ones. Returns whether others are left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program.pid:
                program.returncode = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    """Return the process ids of all children; none on systems without the file (and without subreapers)."""
    try:
        return [int(pid) for pid in _CHILDREN.read_text().split()]
    except FileNotFoundError:
        return []


def descendants(pid: int) -> list[int]:
    """Return the process ids of a process's children, of theirs, and so on."""
    found = list[int]()
    for path in _PROCESSES.glob(f"{pid}/task/*/children"):
        with suppress(OSError):  # it has ended
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):  # it has ended
        return _TRACKER in (_PROCESSES / str(pid) / "cmdline").read_bytes()
    return False


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the files of shared memory that these processes have mapped, found by inode.

    A process that made a semaphore has it mapped under another name.
    """
    mapped = set[int]()
    for pid in pids:
        with suppress(OSError):  # it has ended
            lines = (_PROCESSES / str(pid) / "maps").read_text(errors="replace").splitlines()
            mapped |= {int(line.split()[4]) for line in lines if f"{SHARED}/" in line}
    with suppress(FileNotFoundError), os.scandir(SHARED) as files:
        return {file.path for file in files if file.name.startswith(_PREFIXES) and file.inode() in mapped}
    return set()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main()
