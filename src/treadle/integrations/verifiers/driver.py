"""`VerifiersDriver`: plays tasks of verifiers' environments by the library's own rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.core.config import build
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


class VerifiersDriver(WorkerDriver):
    """Plays tasks of the source `verifiers`. python: of the library. worker: settings of its processes."""

    family = "verifiers"

    def __init__(self, setup: DriverSetup, python: str | None = None, worker: Mapping[str, Any] | None = None) -> None:
        super().__init__(setup, verifiers_program(python), build(WorkerConfig, worker or {}))

    def order(self, task: Task) -> dict[str, Any]:
        if missing := [key for key in KEYS if key not in task.extras]:
            raise TrajectoryFailure(
                Cause.AGENT, f"the task's extras have no {', '.join(missing)}; take tasks of the source 'verifiers'"
            )
        return {"do": "play", **{key: task.extras[key] for key in KEYS}}
