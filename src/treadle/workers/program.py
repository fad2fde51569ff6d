"""`Program`: any program as a child process; all that it starts ends with it.

Program -> reaper.py -> the program -> what it starts
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from treadle.workers import reaper

INHERITED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*"),
)
"""Environment variables of the run that a program gets: what it needs to start and read files, and no secrets."""

_REAPER = (sys.executable, "-I", "-S", str(Path(reaper.__file__)))

Result = dict[str, Any]
"""What `reaper.run` returns."""


class Program:
    """A program that is started now: all processes that it starts end with it, with `stop`, and with this process.

    words: the program and its arguments. stdin: a file descriptor; default: nothing. log: the one that its output goes
    to; default: the ends of its outputs are kept for `result`. grace: seconds that `stop` gives it to end by itself.
    shared_memory: remove what its processes leave of it when they are killed. Always call `stop` in the end.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        stdin: int | None = None,
        directory: Path | None = None,
        grace: float = reaper.GRACE,
        log: int | None = None,
        shared_memory: bool = False,
    ) -> None:
        self._process = subprocess.Popen(
            _REAPER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd for fd in (stdin, log) if fd is not None],
            env=inherited_variables(),
            start_new_session=True,  # Ctrl-C is the run's
        )
        self.pid = self._process.pid
        self._result: Future[Result | None] = Future()
        order: dict[str, Any] = {"words": list(words), "environment": dict(environment), "stdin": stdin, "log": log}
        order |= {"directory": directory and str(directory), "grace": grace, "shared_memory": shared_memory}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed, which `result` tells
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        # at once: a full pipe would keep it from ending
        threading.Thread(target=self._read, name="treadle-program", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether a process of the program may be left."""
        return not self._result.done()

    async def result(self) -> Result | None:
        """Wait until no process of the program is left; return `reaper.run`'s result, None if that was killed."""
        return await asyncio.shield(asyncio.wrap_future(self._result))

    async def stop(self) -> None:
        """End the program, and wait until no process of it is left, even if cancelled. Idempotent."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        ending = asyncio.wrap_future(self._result)
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            result = output.read()
        self._process.wait()
        self._result.set_result(json.loads(result) if result else None)


def inherited_variables(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables that a program gets. more: names or patterns beside `INHERITED`."""
    patterns = (*INHERITED, *more)
    return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, p) for p in patterns)}


def how_it_ended(result: Result | None) -> str:
    """Return how a program ended, in words."""
    if result is None:
        return "was killed together with its supervisor"
    if "error" in result:
        return f"cannot be run: {result['error']}"
    last = (result["stderr"].strip() or result["stdout"].strip()).rpartition("\n")[2]
    status = result["status"]
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    return how + (f": {last[-500:]}" if last else "")
