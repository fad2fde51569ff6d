"""What may change in a run's configuration when it is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from treadle.core.config import as_override, describe
from treadle.core.errors import ConfigError
from treadle.engines.config import VLLMConfig
from treadle.orchestration.config import RunConfig

CHANGEABLE = (
    "orchestration.updates",
    "orchestration.traced_groups",
    "orchestration.checkpoint_every",
    "orchestration.ledger_directory",
    "orchestration.keep_last",
    "orchestration.keep_every",
    "orchestration.keep_best",
    "orchestration.max_concurrent_groups",
    "evaluation.*",
    "failures.*",
    "data.table_by",
    "engine.in_flight",
    *(f"engine.options.{name}" for name in VLLMConfig.model_fields),
    "engine.batch",
    "engine.kv_budget",
    "engine.own_process",
    "rollout.agent_timeout",
    "rollout.environment_timeout",
    "rollout.gateway.*",
    "rollout.trajectory_timeout",
    *(f"driver_options.{name}" for name in ("concurrency", "trials_per_second", "python", "worker")),
    *(f"driver_options.{name}" for name in ("trial_directories", "directory")),
    "callbacks",
    "training.threads",
    "training.packing",
    "training.sharing",
    "training.max_tokens_per_microbatch",
    "training.gradient_checkpointing",
    "placement.*",
)
"""Paths, and sections with all below them: pace, cost, what is stored and what is shown; never what is trained."""

_REASONS = {
    "seed": "it keys every draw",
    "data": "the data cursor counts its tasks",
    "model": "the checkpoint is of that model",
    "algorithm": "a run has one objective",
    "training": "the optimizer's state belongs to it",
    "rewards": "rewards on record would no longer compare",
}


class Change(NamedTuple):
    """One difference: `Change("orchestration.updates", 100, 200)`; None also stands for an absent section."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path} {as_override(self.old)} -> {as_override(self.new)}"


def changes(before: RunConfig, after: RunConfig) -> list[Change]:
    """Differences between two configurations, in order of declaration."""
    old, new = (leaves(config) for config in (before, after))
    return [Change(path, old.get(path), new.get(path)) for path in {**new, **old} if old.get(path) != new.get(path)]


def leaves(config: RunConfig) -> dict[str, Any]:
    """Path -> value; options of what is registered (`driver_options`) each by itself."""
    values: dict[str, Any] = {}
    for line in describe(config):
        if isinstance(line.value, dict) and line.path.endswith("options"):
            values |= {f"{line.path}.{name}": value for name, value in line.value.items()}
        else:
            values[line.path] = line.value
    return values


def check_changes(changed: Sequence[Change], updates_done: int = 0) -> None:
    """Raise ConfigError, naming the first one, for changes that would make it another run.

    updates_done: of the checkpoint; 0 if unknown so far.
    """
    for path, old, new in changed:
        if not _may_change(path):
            reason = _REASONS.get(path.partition(".")[0], "what is sampled depends on it")
            raise ConfigError(
                f"{path} is {as_override(new)}, the run was started with {as_override(old)}: {reason}; start a new run "
                f"(model.path may be an export of this one). What may change: {', '.join(CHANGEABLE)}"
            )
        if path == "orchestration.updates" and new < updates_done:
            raise ConfigError(f"{path} is {new}, but the checkpoint has {updates_done} updates; give at least as many")


def _may_change(path: str) -> bool:
    return any(path.startswith(a[:-1]) if a.endswith("*") else path == a for a in CHANGEABLE)
