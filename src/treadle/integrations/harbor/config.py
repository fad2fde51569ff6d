"""`harbor` of a run's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from treadle.core.config import Config, load_yaml
from treadle.core.errors import Cause, ConfigError
from treadle.integrations.worker import WorkerConfig, WorkerProgram
from treadle.integrations.worker.interpreter import interpreter

VENV = "TREADLE_HARBOR_VENV"
HANDLER = Path(__file__).parent / "child" / "treadle_trials.py"
"""What the worker processes run; everything beside it can be imported there."""

REMEDY = (
    "set harbor.python to an interpreter that has Harbor, or make one: python3.12 -m venv .venv-harbor && "
    ".venv-harbor/bin/pip install harbor (in a clone: make harbor-env)"
)


class HarborConfig(Config):
    """Configures Harbor's trials: what is played, where, and what becomes of trials that go wrong."""

    tasks: str = Field(
        "",
        description="to train on: a directory of tasks, a .parquet of packed ones, or a Harbor data set NAME@VERSION",
    )
    held_out: str = Field("", description="the same, to evaluate on")
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
    trial_file: Path | None = Field(None, description="YAML of Harbor's trial configuration")
    trial: dict[str, Any] = Field(
        default_factory=dict,
        description="more of it, which takes the place of what is in the file: {agent: {kwargs: ...}}",
    )
    rewards: tuple[str, ...] = Field(
        ("reward",),
        min_length=1,
        description="keys of the verifier's rewards that count, each a component (rewards.weights weighs them)",
    )
    agent_timed_out: Literal["grade", "drop"] = Field(
        "grade", description="what becomes of a trial whose agent took too long, and which was verified nonetheless"
    )
    context_exceeded: Literal["zero_reward", "drop"] = Field(
        "zero_reward", description="what becomes of a trial whose context was full; Harbor does not verify it"
    )
    start_timeout: float | None = Field(
        None,
        gt=0,
        description="limit on starting a sandbox, and on setting up its agent, seconds (default: the task's)",
    )
    agent_timeout: float | None = Field(None, gt=0, description="limit on the agent, seconds (default: the task's)")
    verifier_timeout: float | None = Field(
        None, gt=0, description="limit on the verifier, seconds (default: the task's)"
    )
    sandbox_lifetime: float | None = Field(
        7200.0, gt=0, description="seconds after which a provider ends a sandbox that nobody ended, where it can"
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
    registry: Path | None = Field(None, description="a registry file in which Harbor looks data sets up")
    worker: WorkerConfig = Field(WorkerConfig(), description="the processes in which trials run")

    @field_validator("trial")
    @classmethod
    def _leaves_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        if problem := _taken(value):
            raise ValueError(problem)
        return value

    def trial_config(self) -> dict[str, Any]:
        """Return the trial configuration of file and recipe. Raises ConfigError for a file that is none."""
        if self.trial_file is None:
            return self.trial
        if not self.trial_file.is_file():
            raise ConfigError(f"harbor.trial_file: no file {str(self.trial_file)!r} (it is relative to {Path.cwd()})")
        given = load_yaml(self.trial_file)
        if problem := _taken(given):
            raise ConfigError(f"{self.trial_file}: {problem}")
        return merged(given, self.trial)


def harbor_program(python: str | None) -> WorkerProgram:
    """Return what the worker processes run. python: an interpreter; default: where `interpreter` finds one."""
    found = interpreter(python, VENV, ".venv-harbor")
    return WorkerProgram("Harbor", HANDLER, found, REMEDY, lost_cause=Cause.INFRASTRUCTURE)


def _taken(trial: dict[str, Any]) -> str:
    """Return what is wrong with a trial configuration that names its task or place; "" if it does not."""
    taken = [key for key in ("task", "trial_name", "trials_dir") if key in trial]
    return f"{taken[0]!r} is set by the run, trial by trial; remove it" if taken else ""


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return both, key by key, at every depth; where both have a value, that of `above`."""
    both = {
        key: merged(below[key], above[key])
        for key in below.keys() & above.keys()
        if isinstance(below[key], dict) and isinstance(above[key], dict)
    }
    return {**below, **above, **both}
