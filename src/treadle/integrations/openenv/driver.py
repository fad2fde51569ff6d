"""`OpenEnvDriver`: plays tasks in sessions of an OpenEnv server, which it starts if need be."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from treadle.core.errors import Cause, ConfigError
from treadle.core.types import Task
from treadle.engines.vllm.launch import free_port
from treadle.integrations.openenv.config import PORT, OpenEnvConfig
from treadle.integrations.worker.driver import WorkerDriver
from treadle.integrations.worker.interpreter import interpreter
from treadle.integrations.worker.process import WorkerProgram
from treadle.rollout.agents.command import SupervisedProgram, inherited_variables
from treadle.rollout.drivers.driver import DriverSetup

VENV = "TREADLE_OPENENV_VENV"

_REMEDY = (
    f"name an interpreter that has openenv-core (driver_options.python, or its virtual environment in ${VENV}), or "
    "make one: python3.12 -m venv .venv-openenv && .venv-openenv/bin/pip install openenv-core "
    "(in a clone: make openenv-env)"
)
_START = 600.0  # seconds that a command may take until it listens
_LOOK = 0.1  # seconds between two looks at whether the server listens


class OpenEnvDriver(WorkerDriver):
    """Plays any task with a prompt: each attempt is a session of the server, as long as it lasts.

    The model reads the task's prompt and the observation of `reset`, then the observation of each step; its replies are
    the actions. `extras.reset` of a task is what its session is reset with. The reward is the sum of the steps'.
    """

    family = "openenv"
    options_type = OpenEnvConfig

    def __init__(self, setup: DriverSetup, options: OpenEnvConfig) -> None:
        port = free_port()
        handled = {
            "url": options.server if isinstance(options.server, str) else f"http://127.0.0.1:{port}",
            "action": options.action,
            "observation": options.observation,
        }
        program = WorkerProgram(
            name="OpenEnv",
            handler=Path(__file__).parent / "child" / "treadle_openenv.py",
            python=interpreter(options.python, VENV, ".venv-openenv"),
            remedy=_REMEDY,
            options=handled,
            cause=Cause.AGENT,
            lost_cause=Cause.INFRASTRUCTURE,
        )
        super().__init__(
            setup,
            program,
            options.worker,
            first=None if isinstance(options.server, str) else _served(options.server, port),
        )

    def order(self, task: Task) -> dict[str, Any]:
        return {"prompt": [dict(message) for message in task.prompt], "reset": task.extras.get("reset", {})}


@asynccontextmanager
async def _served(command: Sequence[str], port: int) -> AsyncIterator[None]:
    """Run the command until the context ends; nothing of it stays behind. Raises ConfigError if it does not serve."""
    words = [word.replace(PORT, str(port)) for word in command]
    with open(os.devnull) as nothing:
        server = await SupervisedProgram.start(words, inherited_variables(), nothing.fileno())
    try:
        ended = asyncio.ensure_future(server.result())  # at the latest when it is stopped
        try:
            async with asyncio.timeout(_START):
                while not (ended.done() or await _listens(port)):
                    await asyncio.sleep(_LOOK)
        except TimeoutError:
            raise ConfigError(
                f"driver_options.server: {' '.join(words)!r} does not listen on port {port} after {_START:g} s"
            ) from None
        if ended.done():
            raise ConfigError(f"driver_options.server: {' '.join(words)!r} {_how(ended.result() or {})}")
        yield
    finally:
        await server.stop()


async def _listens(port: int) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False


def _how(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"cannot be run: {result['error']}"
    last = (result.get("stderr", "").strip() or result.get("stdout", "").strip()).rpartition("\n")[2]
    return f"ended with status {result.get('status')}: {last[-300:]}"
