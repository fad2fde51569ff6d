"""`VerifiersDriver`: plays tasks of verifiers' environments by the library's own rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from treadle.core.config import Config
from treadle.core.errors import Cause, TrajectoryFailure
from treadle.core.types import Task
from treadle.integrations.worker.config import WorkerConfig
from treadle.integrations.worker.driver import WorkerDriver
from treadle.integrations.worker.interpreter import interpreter
from treadle.integrations.worker.process import WorkerProgram
from treadle.rollout.drivers.driver import DriverSetup

DRIVER = "verifiers"
VENV = "TREADLE_VERIFIERS_VENV"
KEYS = ("environment", "arguments", "split", "row", "digest")
"""What a task's extras say of it (`tasks`)."""

_REMEDY = (
    "name an interpreter that has verifiers and the environment (driver_options.python, and python in the options of "
    f"the source; or its virtual environment in ${VENV}), or make one: python3.12 -m venv .venv-verifiers && "
    ".venv-verifiers/bin/pip install verifiers uv (in a clone: make verifiers-env)"
)


def verifiers_program(python: str | None) -> WorkerProgram:
    """Return what worker processes of verifiers run. python: an interpreter; default: where `interpreter` finds one."""
    return WorkerProgram(
        name="verifiers",
        handler=Path(__file__).parent / "child" / "treadle_verifiers.py",
        python=interpreter(python, VENV, ".venv-verifiers"),
        remedy=_REMEDY,
        cause=Cause.AGENT,
        lost_cause=Cause.INFRASTRUCTURE,
    )


class VerifiersConfig(Config):
    """Options of the driver `verifiers`."""

    python: str | None = Field(
        None, description=f"interpreter that has verifiers; default: of ${VENV}, else of .venv-verifiers"
    )
    worker: WorkerConfig = Field(WorkerConfig(), description="the processes that play attempts")


class VerifiersDriver(WorkerDriver):
    """Plays tasks of the source `verifiers`."""

    family = "verifiers"
    options_type = VerifiersConfig

    def __init__(self, setup: DriverSetup, options: VerifiersConfig) -> None:
        super().__init__(setup, verifiers_program(options.python), options.worker)

    def order(self, task: Task) -> dict[str, Any]:
        """Return the row of the environment's data set that is to be played."""
        if missing := [key for key in KEYS if key not in task.extras]:
            raise TrajectoryFailure(
                Cause.AGENT, f"the task's extras have no {', '.join(missing)}; take tasks of the source 'verifiers'"
            )
        return {"do": "play", **{key: task.extras[key] for key in KEYS}}
