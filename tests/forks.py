"""Python processes that start at once: forks of one that has imported torch, transformers and the trainer.

`ForkedProcess` takes the place of `subprocess.Popen` for `python -m module` and `python -c code`. The server that forks
is started by its first use, or by `start_server`, and ends with the last process that can use it.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_IMPORTED = (
    "pandas",  # a run imports it late
    "pyarrow.parquet",
    "transformers",
    "transformers.models.qwen3.modeling_qwen3",
    "treadle.api.run",
    "treadle.training.rank_group",
    "treadle.engines.remote",
    "treadle.cli.main",
)
_servers: list[socket.socket] = []  # at most one
_started: list["ForkedProcess"] = []


class ForkedProcess(subprocess.Popen[Any]):
    """Take the arguments of `subprocess.Popen`: `[python, "-m", module, ...]` or `[python, "-c", code, ...]`."""

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        (_, _, _, pass_fds, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_) = rest
        self._ended, ended = os.pipe()  # gets the process's id, then how it ended
        streams = [fd if fd >= 0 else number for number, fd in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "words": [word for word in args[1:] if word != "-P"],
            "cwd": str(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": rest[-2],
            "fds": [0, 1, 2, *pass_fds],
        }
        start_server()
        socket.send_fds(_servers[0], [json.dumps(request).encode()], [ended, *streams, *pass_fds])
        os.close(ended)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]
        self._child_created = True
        self.pid = int(os.read(self._ended, 32))
        _started.append(self)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._ended], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._ended, 32)
        os.close(self._ended)
        return self.pid, int(status or signal.SIGKILL)

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        lock = self._waitpid_lock  # type: ignore[attr-defined]
        if self.returncode is None and lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                lock.release()
        return self.returncode


def running(module: str = "") -> set[int]:
    """Return the ids of the processes of a module, or of all, that this process started and that have not ended."""
    alive = [process for process in _started if Path(f"/proc/{process.pid}").exists()]
    return {process.pid for process in alive if not module or module in str(process.args)}


def run(words: list[str], text: str = "", **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a process to its end as `subprocess.run(..., input=text, capture_output=True, text=True)` does."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with ForkedProcess(words, text=True, **pipes, **options) as process:
        out, err = process.communicate(text)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def start_server() -> None:
    """Start the process that is forked, unless there is one. Processes that this one forks use the same."""
    if not _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        _servers.append(ours)
        atexit.register(ours.close)


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for every request; return one in the fork. The server itself exits once nobody can ask any more."""
    processes: dict[int, tuple[int, int]] = {}  # pidfd -> the process, and where its end is told
    while True:
        ready, _, _ = select.select([requests.fileno(), *processes], [], [])
        for pidfd in set(ready) & set(processes):
            pid, ended = processes.pop(pidfd)
            status = os.waitpid(pid, 0)[1]
            _tell(ended, status)
            os.close(ended)
            os.close(pidfd)
        if requests.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(requests, 2**20, 64)
        if not message:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            request: dict[str, Any] = json.loads(message)
            requests.detach()
            free = max(*fds, *request["fds"]) + 1
            for number, fd in enumerate(fds[1:]):
                os.dup2(fd, free + number)
            os.closerange(3, free)
            for number, fd in enumerate(request["fds"]):
                os.dup2(free + number, fd)
            os.closerange(free, free + len(fds))
            return request
        for fd in fds[1:]:
            os.close(fd)
        _tell(fds[0], pid)
        processes[os.pidfd_open(pid)] = (pid, fds[0])


def _tell(fd: int, number: int) -> None:
    with suppress(BrokenPipeError):  # who started the process has ended
        os.write(fd, str(number).encode())


def _run(request: dict[str, Any]) -> None:
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, what, *arguments = request["words"]
    sys.argv = ["-c" if kind == "-c" else what, *arguments]
    if kind == "-m":
        sys.modules.pop(what, None)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    for _name in _IMPORTED:
        importlib.import_module(_name)
    gc.freeze()
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
