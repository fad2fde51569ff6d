"""`OpenEnvDriver`: plays tasks in sessions of an OpenEnv server, started if necessary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from treadle.core.config import Config
from treadle.core.errors import Cause, ConfigError
from treadle.core.types import Task
from treadle.engines.vllm.launch import free_port
from treadle.integrations.worker_driver import WorkerDriver
from treadle.rollout.drivers.driver import DriverSetup
from treadle.workers.foreign import WorkerConfig, WorkerProgram, interpreter
from treadle.workers.program import Program, how_it_ended, inherited_variables

PORT = "{port}"
VENV = "TREADLE_OPENENV_VENV"

_REMEDY = (
    f"name an interpreter with openenv-core (driver_options.python, or its virtual environment in ${VENV}), or "
    "make one: python3.12 -m venv .venv-openenv && .venv-openenv/bin/pip install openenv-core "
    "(in a clone: make openenv-env)"
)
_START = 600.0  # seconds for a command to start listening
_LOOK = 0.1  # seconds between checks whether the server listens


class OpenEnvConfig(Config):
    """Configures the server of an environment, and the mapping of replies to actions."""

    server: str | tuple[str, ...] = Field(
        description="base URL of a running server, or the command to start one for the duration of the run; "
        f"{PORT} in it becomes a free port"
    )
    action: str = Field(
        "",
        description="field of the action for the model's reply; default: the only one, if it is text; "
        "otherwise the reply must be the action as JSON",
    )
    observation: str = Field("", description="field of the observation for the model; default: all, as JSON")
    python: str | None = Field(
        None, description="interpreter with openenv-core; default: from $TREADLE_OPENENV_VENV, or .venv-openenv"
    )
    worker: WorkerConfig = Field(WorkerConfig(), description="processes that play attempts")

    @field_validator("server")
    @classmethod
    def _can_be_reached(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(value, tuple):
            if not any(PORT in word for word in value):
                raise ValueError(f"the command {' '.join(value)!r} has no {PORT}, the port that the server must take")
            return value
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is not a base URL; write it as in http://127.0.0.1:8000")
        return value.rstrip("/")


class OpenEnvDriver(WorkerDriver):
    """Plays any task with a prompt: each attempt is one session of the server.

    The model reads the task's prompt and the observation of `reset`, then the observation of each step; its replies are
    the actions. `extras.reset` of a task contains the arguments of `reset`. The reward is the sum over steps.
    """

    family = "openenv"
    options_type = OpenEnvConfig

    def __init__(self, setup: DriverSetup, options: OpenEnvConfig) -> None:
        port, url, server = free_port(), options.server, None
        if not isinstance(url, str):
            url, server = f"http://127.0.0.1:{port}", _served(url, port)
        program = WorkerProgram(
            name="OpenEnv",
            handler=Path(__file__).parent / "child" / "treadle_openenv.py",
            python=interpreter(options.python, VENV, ".venv-openenv"),
            remedy=_REMEDY,
            options={"url": url, "action": options.action, "observation": options.observation},
            cause=Cause.AGENT,
            lost_cause=Cause.INFRASTRUCTURE,
        )
        super().__init__(setup, program, options.worker, first=server)

    def order(self, task: Task) -> dict[str, Any]:
        return {"prompt": [dict(message) for message in task.prompt], "reset": task.extras.get("reset", {})}


@asynccontextmanager
async def _served(command: Sequence[str], port: int) -> AsyncIterator[None]:
    """Run the command until the context ends, leaving no process behind. Raises ConfigError if it does not serve."""
    words = [word.replace(PORT, str(port)) for word in command]
    where = f"driver_options.server: {' '.join(words)!r}"
    server = Program(words, inherited_variables())
    try:
        # Completes at the latest when it is stopped.
        ended = asyncio.ensure_future(server.result())
        try:
            async with asyncio.timeout(_START):
                while not (ended.done() or await _listens(port)):
                    await asyncio.sleep(_LOOK)
        except TimeoutError:
            raise ConfigError(f"{where} does not listen on port {port} after {_START:g} s") from None
        if ended.done():
            raise ConfigError(f"{where} {how_it_ended(ended.result())}")
        yield
    finally:
        await server.stop()


async def _listens(port: int) -> bool:
    with suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False
