"""Metrics of a batch over trajectories and tasks, never over rows. Every name says its unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.core.types import Group, Trajectory
from treadle.orchestration.rewards import reward_metrics

Figure = float | None


def mean(values: Sequence[float]) -> Figure:
    """None for nothing: a mean of no trajectory is not 0."""
    return sum(values) / len(values) if values else None


def shown(value: Figure, digits: int = 3) -> str:
    """`0.412`, or `-` where there is no value."""
    return "-" if value is None else f"{value:.{digits}f}"


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Held-out tasks played once each.

    success: share of graded attempts, None without any; by: the same per value of `table_by`.
    """

    update: int
    temperature: float
    tasks: int
    failed: int
    success: Figure
    reward_mean: Figure
    steps_mean: Figure
    by: dict[str, Figure]
    by_tasks: dict[str, int]


def trajectory_metrics(groups: Sequence[Group], success_at: float, success_of: str | None = None) -> dict[str, Figure]:
    """Means over the graded trajectories of an update and over the tasks that have any; how all of them ended.

    prompt_tokens counts every prompt as sent, so a token that three steps share counts three times.
    """
    everyone = [t for group in groups for t in group.trajectories]
    graded = [t for t in everyone if t.reward is not None]
    tasks = [own for own in ([t for t in group.trajectories if t.reward is not None] for group in groups) if own]
    trained = [[t.trained_reward for t in own if t.trained_reward is not None] for own in tasks]
    return {
        "reward_mean": mean([t.reward for t in graded if t.reward is not None]),
        **reward_metrics(graded),
        "success": mean([_success(t, success_at, success_of) for t in graded]),
        "pass_at_k": mean([max(_success(t, success_at, success_of) for t in own) for own in tasks]),
        "equal_reward_groups": mean([float(min(own) == max(own)) for own in trained if own]),
        "trajectories": len(everyone),
        "failed": len(everyone) - len(graded),
        "warnings": sum(bool(t.warning) for t in everyone),
        "steps_mean": mean([len(t.live_steps) for t in graded]),
        "completion_tokens_mean": mean([t.completion_tokens for t in graded]),
        "prompt_tokens_mean": mean([sum(len(s.prompt_ids) for s in t.live_steps) for t in graded]),
        **_shares("ended", [str(t.status) for t in everyone]),
        **_shares("last_stop", [str(t.live_steps[-1].stop_reason) for t in graded if t.live_steps]),
    }


def evaluation_result(
    groups: Sequence[Group],
    update: int,
    temperature: float,
    success_at: float,
    table_by: str | None,
    success_of: str | None = None,
) -> EvaluationResult:
    """Summarise one evaluation."""
    graded = [(g, t) for g in groups for t in g.trajectories if t.reward is not None]
    parts: dict[str, list[float]] = {}
    for group, trajectory in graded:
        if table_by is not None:
            parts.setdefault(str(group.task.extras.get(table_by)), []).append(
                _success(trajectory, success_at, success_of)
            )
    return EvaluationResult(
        update=update,
        temperature=temperature,
        tasks=len(groups),
        failed=len(groups) - len(graded),
        success=mean([_success(t, success_at, success_of) for _, t in graded]),
        reward_mean=mean([t.reward for _, t in graded if t.reward is not None]),
        steps_mean=mean([len(t.live_steps) for _, t in graded]),
        by={key: mean(parts[key]) for key in sorted(parts)},
        by_tasks={key: len(parts[key]) for key in sorted(parts)},
    )


def _success(trajectory: Trajectory, success_at: float, success_of: str | None) -> float:
    reached = trajectory.given(success_of)
    return float(reached is not None and reached >= success_at)


def _shares(prefix: str, values: Sequence[str]) -> dict[str, float]:
    return {f"{prefix}_{value}": count / len(values) for value, count in sorted(Counter(values).items())}
