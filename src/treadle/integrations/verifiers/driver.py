"""The source and the driver `verifiers`: rows of an environment's own data set, played by its own rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from treadle.core.config import Config
from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.core.types import Task
from treadle.integrations.worker_driver import WorkerDriver
from treadle.rollout.drivers.driver import DriverSetup
from treadle.workers.foreign import WorkerConfig, WorkerProgram, call_once, interpreter

VENV = "TREADLE_VERIFIERS_VENV"
KEYS = ("environment", "arguments", "split", "row", "digest")
"""Extras of a task for the driver."""

_REMEDY = (
    "name an interpreter with verifiers and the environment (driver_options.python, and python in the options of "
    f"the source; or its virtual environment in ${VENV}), or make one: python3.12 -m venv .venv-verifiers && "
    ".venv-verifiers/bin/pip install verifiers uv (in a clone: make verifiers-env)"
)


def verifiers_program(python: str | None) -> WorkerProgram:
    """Return the program of the worker processes. python: an interpreter; default: as found by `interpreter`."""
    return WorkerProgram(
        name="verifiers",
        handler=Path(__file__).parent / "child" / "treadle_verifiers.py",
        python=interpreter(python, VENV, ".venv-verifiers"),
        remedy=_REMEDY,
        cause=Cause.AGENT,
        lost_cause=Cause.INFRASTRUCTURE,
    )


def verifiers(
    split: str,
    environment: str,
    arguments: Mapping[str, Any] | None = None,
    count: int | None = None,
    first: int = 0,
    python: str | None = None,
    worker: Mapping[str, Any] | None = None,
) -> Iterator[Mapping[str, Any]]:
    """Yield rows of the environment's training data (split `train`), or of its evaluation data.

    environment: as the library loads it; for v1, the id of a taskset. arguments: arguments for loading it; for v1, the
    section `env` of its configuration. count: number of rows (default: all; required for an infinite taskset). first:
    rows to skip before them, so that training and held-out tasks of one taskset differ. python, worker: as for the
    driver.

    Raises ConfigError if the library or the environment cannot be loaded.
    """
    chosen = {"environment": environment, "arguments": dict(arguments or {}), "split": split}
    try:
        order = {"do": "rows", **chosen, "first": first, "count": count}
        answer = asyncio.run(call_once(verifiers_program(python), worker, order))
    except TrajectoryFailure as failure:
        raise ConfigError(
            f"verifiers: environment {environment!r} gives no {split} data: {failure.message}"
        ) from failure
    for row in answer["rows"]:
        yield {
            "task_id": f"{environment}-{split}-{row['row']:06d}",
            "prompt": row["prompt"],
            "driver": "verifiers",
            "ground_truth": row["answer"],
            "extras": {**chosen, "row": row["row"], "digest": row["digest"]},
        }


class VerifiersConfig(Config):
    """Options of the driver `verifiers`."""

    python: str | None = Field(
        None, description=f"interpreter with verifiers; default: from ${VENV}, or .venv-verifiers"
    )
    worker: WorkerConfig = Field(WorkerConfig(), description="processes that play attempts")


class VerifiersDriver(WorkerDriver):
    """Plays tasks of the source `verifiers`."""

    family = "verifiers"
    options_type = VerifiersConfig

    def __init__(self, setup: DriverSetup, options: VerifiersConfig) -> None:
        super().__init__(setup, verifiers_program(options.python), options.worker)

    def order(self, task: Task) -> dict[str, Any]:
        if missing := [key for key in KEYS if key not in task.extras]:
            raise TrajectoryFailure(
                Cause.AGENT, f"the task's extras have no {', '.join(missing)}; use tasks of the source 'verifiers'"
            )
        return {"do": "play", **{key: task.extras[key] for key in KEYS}}
