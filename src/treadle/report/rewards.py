"""Warnings about reward settings without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle.core.outcomes import as_played
from treadle.core.types import Trajectory


@dataclass(frozen=True, slots=True)
class Grading:
    """Settings for the interpretation of rewards and attempts.

    advantage: name of the estimator. weights: names of the reward components with a weight. compares: whether a group
    reward compares attempts. group_size: attempts per training task; an update takes `tasks_per_update` tasks.
    attempts: number per held-out task. success_at, success_of: minimum reward of a success, and its component (None:
    the whole reward). held_out: whether there are held-out tasks.
    """

    advantage: str
    weights: tuple[str, ...]
    compares: bool
    group_size: int
    tasks_per_update: int
    attempts: int
    success_at: float
    success_of: str | None
    held_out: bool


def lone_attempts(grading: Grading) -> Iterator[str]:
    """Yield a line if evaluations leave a group reward nothing to compare."""
    if grading.compares and grading.attempts == 1:
        yield (
            "rewards.group gets one attempt per held-out task, as evaluation.attempts is 1: a reward that "
            f"compares attempts is meaningless there; set evaluation.attempts={grading.group_size}"
        )


def unknown_components(trajectories: Sequence[Trajectory], grading: Grading, where: str) -> Iterator[str]:
    """Yield a line for each setting that names a reward component missing in all trajectories."""
    names = {component for t in trajectories for component in as_played(t).components}
    judged = grading.success_of
    named = {"rewards.weights": [*grading.weights], "evaluation.success_of": [judged] if judged else []}
    for option, components in named.items():
        unknown = [component for component in components if component not in names]
        if unknown and any(t.reward is not None for t in trajectories):
            had = ", ".join(sorted(names)) or "none"
            yield f"{option}: nothing in {where} was given as {', '.join(unknown)}; components: {had}"
