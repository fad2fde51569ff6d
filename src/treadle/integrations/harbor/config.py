"""Options of the driver `harbor`."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, field_validator

from treadle.core.config import Config
from treadle.core.errors import Cause
from treadle.integrations.worker import WorkerConfig, WorkerProgram
from treadle.integrations.worker.pool import interpreter

VENV = "TREADLE_HARBOR_VENV"
HANDLER = Path(__file__).parent / "child" / "treadle_trials.py"
"""What the worker processes run; everything beside it can be imported there."""

REMEDY = (
    "set driver_options.python to an interpreter that has Harbor, or make one: python3.12 -m venv .venv-harbor && "
    ".venv-harbor/bin/pip install harbor (in a clone: make harbor-env)"
)


class HarborConfig(Config):
    """Configures Harbor's trials: who plays, where, and what becomes of trials that go wrong."""

    removed_keys = MappingProxyType(
        {
            **dict.fromkeys(("tasks", "held_out"), "set path in the options of data.train and data.held_out"),
            "registry": "set it in the options of data.train and data.held_out",
            "trial_file": "write its keys into trial",
            "agent_timeout": "set agent.override_timeout_sec in trial",
            "verifier_timeout": "set verifier.override_timeout_sec in trial",
            "start_timeout": "set environment_build_timeout_multiplier and agent.override_setup_timeout_sec in trial",
            "context_exceeded": "set rewards.overlong",
            "sandbox_lifetime": "set rollout.trajectory_timeout, of which it is twice, or trial.environment.kwargs",
        }
    )

    agent: str = Field(
        "terminus-2",
        min_length=1,
        description="terminus-2 (ours, faster), terminus-2-stock, a name of Harbor's, or module:Class",
    )
    environment: str = Field(
        "docker",
        min_length=1,
        description="where sandboxes are: local (bubblewrap, for trusted tasks), a name of Harbor's, or module:Class",
    )
    trial: dict[str, Any] = Field(
        default_factory=dict, description="Harbor's trial configuration: {agent: {override_timeout_sec: 1200}}"
    )
    rewards: tuple[str, ...] = Field(
        ("reward",),
        min_length=1,
        description="keys of the verifier's rewards that count, each a component (rewards.weights weighs them)",
    )
    agent_timed_out: Literal["grade", "drop"] = Field(
        "grade", description="what becomes of a trial whose agent took too long, and which was verified nonetheless"
    )
    concurrency: int = Field(128, ge=1, description="trials at once")
    trials_per_second: float = Field(5.0, gt=0, description="trials that are begun in a second, at most")
    trial_directories: Literal["keep", "thin", "delete"] = Field(
        "delete", description="what becomes of Harbor's record of a trial; thin leaves out what the agent wrote"
    )
    directory: Path | None = Field(
        None, description="where those are (default: `trials` of the run's directory; temporary in an evaluation)"
    )
    python: str | None = Field(
        None, description=f"interpreter that has Harbor; default: of ${VENV}, else of .venv-harbor"
    )
    worker: WorkerConfig = Field(WorkerConfig(), description="the processes in which trials run")

    @field_validator("trial")
    @classmethod
    def _leaves_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := [key for key in ("task", "trial_name", "trials_dir") if key in value]:
            raise ValueError(f"{taken[0]!r} is set by the run, trial by trial; remove it")
        return value


def harbor_program(python: str | None) -> WorkerProgram:
    """Return what the worker processes run. python: an interpreter; default: where `interpreter` finds one."""
    path = interpreter(python, VENV, ".venv-harbor")
    return WorkerProgram("Harbor", HANDLER, path, REMEDY, lost_cause=Cause.INFRASTRUCTURE)
