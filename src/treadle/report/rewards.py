"""Lines about settings of rewards that have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from treadle.core.outcomes import as_played
from treadle.core.types import Trajectory
from treadle.plan.config import RunConfig


def lone_attempts(config: RunConfig) -> Iterator[str]:
    """Yield a line if evaluations give a group reward nothing to compare."""
    if config.rewards.group is not None and config.evaluation.attempts == 1:
        yield (
            "rewards.group is given one attempt at each held-out task, as evaluation.attempts is 1: a reward that "
            f"compares attempts says nothing there; set evaluation.attempts={config.training.group_size}"
        )


def unknown_components(trajectories: Sequence[Trajectory], config: RunConfig, where: str) -> Iterator[str]:
    """Yield a line for each setting that names components of rewards which no trajectory was given."""
    names = {component for t in trajectories for component in as_played(t).components}
    judged = config.evaluation.success_of
    named = {"rewards.weights": [*config.rewards.weights], "evaluation.success_of": [judged] if judged else []}
    for option, components in named.items():
        unknown = [component for component in components if component not in names]
        if unknown and any(t.reward is not None for t in trajectories):
            had = ", ".join(sorted(names)) or "none"
            yield f"{option}: nothing in {where} was given as {', '.join(unknown)}; components: {had}"
