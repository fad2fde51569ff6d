"""`SupervisedProgram`: a program of which nothing stays behind, as this side sees it (`supervisor` is the other)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

from treadle.rollout.agents import supervisor

INHERITED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH"),
    *("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Environment variables of the run that a program gets: what it needs to start and read files, and no secrets."""

_SUPERVISOR = (sys.executable, "-I", "-S", str(Path(supervisor.__file__)))


class SupervisedProgram:
    """A program under a supervisor: all processes that it starts end with it, with `stop`, and with this process.

    Make it with `start`, and always call `stop` in the end.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self._process = process
        self._output = asyncio.ensure_future(process.stdout.read())  # at once: a full pipe would keep it from ending

    @classmethod
    async def start(
        cls,
        words: Sequence[str],
        environment: Mapping[str, str],
        stdin: int,
        directory: Path | None = None,
        user_namespace: bool = False,
        grace: float = supervisor.GRACE,
    ) -> Self:
        """Start the program. stdin: a file descriptor. grace: seconds that `stop` gives it to end by itself."""
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *_SUPERVISOR,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(stdin,),
                env=inherited_variables(),
                start_new_session=True,  # Ctrl-C is the run's
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:  # asyncio itself would leave its pipes open
            await cls(await starting).stop()
            raise
        assert process.stdin is not None
        process.stdin.write(_order(words, environment, stdin, directory, user_namespace, grace))
        return cls(process)

    async def result(self) -> dict[str, Any] | None:
        """Wait until no process of the program is left; return `supervisor.run`'s result, None if that was killed."""
        output = await asyncio.shield(self._output)
        return json.loads(output) if output else None

    async def stop(self) -> None:
        """End the program, and wait until no process of it is left, even if cancelled."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        ending = asyncio.gather(self._output, self._process.wait())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise


def inherited_variables(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables that a program gets. more: names or patterns beside `INHERITED`."""
    patterns = (*INHERITED, *more)
    return {name: value for name, value in os.environ.items() if any(fnmatchcase(name, p) for p in patterns)}


def no_user_namespace() -> str:
    """Return why a program cannot have a user namespace of its own; "" if it can."""
    order = _order(["true"], {}, 0, None, True, supervisor.GRACE)
    done = subprocess.run(_SUPERVISOR, input=order, capture_output=True, check=False)
    return str(json.loads(done.stdout).get("error", ""))


def _order(
    words: Sequence[str],
    environment: Mapping[str, str],
    stdin: int,
    directory: Path | None,
    user_namespace: bool,
    grace: float,
) -> bytes:
    order = {
        "words": list(words),
        "environment": dict(environment),
        "directory": None if directory is None else str(directory),
        "stdin": stdin,
        "user_namespace": user_namespace,
        "grace": grace,
    }
    return json.dumps(order).encode() + b"\n"
