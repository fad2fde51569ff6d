"""Options of the driver `harbor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from treadle.core.config import Config
from treadle.core.errors import Cause
from treadle.workers.foreign import WorkerConfig, WorkerProgram, interpreter

VENV = "TREADLE_HARBOR_VENV"
HANDLER = Path(__file__).parent / "child" / "treadle_trials.py"
"""The handler of the worker processes; modules beside it can be imported there."""

REMEDY = (
    "set driver_options.python to an interpreter with Harbor, or make one: python3.12 -m venv .venv-harbor && "
    ".venv-harbor/bin/pip install harbor (in a clone: make harbor-env)"
)


class HarborConfig(Config):
    """Configures Harbor's trials: agent, environment, and handling of problems."""

    agent: str = Field(
        "terminus-2",
        min_length=1,
        description="terminus-2 (ours, faster), terminus-2-stock, a name of Harbor's, or module:Class",
    )
    environment: str = Field(
        "docker",
        min_length=1,
        description="sandboxes: local (bubblewrap, for trusted tasks), a name of Harbor's, or module:Class",
    )
    trial: dict[str, Any] = Field(
        default_factory=dict, description="Harbor's trial configuration: {agent: {override_timeout_sec: 1200}}"
    )
    rewards: tuple[str, ...] = Field(
        ("reward",),
        min_length=1,
        description="keys of the verifier's rewards to use, each a component (see rewards.weights)",
    )
    agent_timed_out: Literal["grade", "drop"] = Field(
        "grade", description="handling of a trial that was verified although its agent timed out"
    )
    concurrency: int = Field(128, ge=1, description="number of concurrent trials")
    trials_per_second: float = Field(5.0, gt=0, description="maximum number of trials begun per second")
    trial_directories: Literal["keep", "thin", "delete"] = Field(
        "delete", description="handling of Harbor's record of a trial; thin omits the agent's files"
    )
    directory: Path | None = Field(
        None,
        description="directory of these records (default: `trials` in the run's directory; temporary in an evaluation)",
    )
    python: str | None = Field(None, description=f"interpreter with Harbor; default: from ${VENV}, or .venv-harbor")
    worker: WorkerConfig = Field(WorkerConfig(), description="processes that run trials")

    @field_validator("trial")
    @classmethod
    def _leaves_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := [key for key in ("task", "trial_name", "trials_dir") if key in value]:
            raise ValueError(f"{taken[0]!r} is set by the run, trial by trial; remove it")
        return value


def harbor_program(python: str | None) -> WorkerProgram:
    """Return the program of the worker processes. python: an interpreter; default: as found by `interpreter`."""
    path = interpreter(python, VENV, ".venv-harbor")
    return WorkerProgram("Harbor", HANDLER, path, REMEDY, lost_cause=Cause.INFRASTRUCTURE)
