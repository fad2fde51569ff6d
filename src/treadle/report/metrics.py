"""Metrics of played and of trained data: over trajectories, tasks and tokens, never over rows.

Each declares its view (`core.metrics.View`). Metrics of played data use `core.outcomes.as_played` and do not depend on
later drops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from treadle.core.metrics import Figure, Measures, Metric, View, declared, measured, shares
from treadle.core.outcomes import TrajectoryView, as_played, as_trained, attempt_drop_reason, dropped_steps
from treadle.core.rewards import PLAIN
from treadle.core.types import BreakCause, DropReason, Group, Ids, Status, Step, StopReason, Task, Trajectory
from treadle.training import metrics as training_metrics


def _mean(name: str, unit: str, text: str, view: View = "played") -> Metric:
    return Metric(name, "trajectory", "mean", unit, text, view=view)


# over graded trajectories

REWARD_MEAN = _mean("reward_mean", "", "reward")
REWARD_POSITIVE = _mean("reward_positive", "share", "reward above 0")
REWARD_COMPONENT = _mean("reward_*_mean", "", "one component of the reward, before weights, if there are named ones")
SHAPED_REWARD = _mean("shaped_reward_mean", "", "reward in the baseline, where shaping did anything", view="trained")
SUCCESS = _mean("success", "share", "reward, or `evaluation.success_of`, of at least `evaluation.success_at`")
STEPS_MEAN = _mean("steps_mean", "steps", "LLM calls")
STEPS_MAX = Metric("steps_max", "trajectory", "max", "steps", "most LLM calls")
COMPLETION_TOKENS_MEAN = _mean("completion_tokens_mean", "tokens", "sampled, over all its steps")
COMPLETION_TOKENS_MAX = Metric("completion_tokens_max", "trajectory", "max", "tokens", "most sampled")
PROMPT_TOKENS_MEAN = _mean("prompt_tokens_mean", "tokens", "prompts as sent: what three steps share counts three times")
COMPACTIONS = _mean("compactions_mean", "compactions", "a summary took the place of earlier messages")
SUMMARY_TOKENS = _mean("summary_tokens_mean", "tokens", "sampled in summaries that `rollout.compaction` asked for")
TRAJECTORY_SECONDS = _mean("trajectory_seconds_mean", "seconds", "from its first to its last moment")
ENGINE_SHARE = _mean("engine_share", "share", "of those seconds in engine calls; concurrent calls add up")
STARTS = _mean(
    "starts", "share", "began in the middle of a recorded attempt (`rollout.starts`, `rollout.forks`), if any did"
)
START_STEPS = _mean("start_steps_mean", "steps", "replayed before those attempts' own")
WHOLE_SUCCESS = _mean("whole_success", "share", "success of the other attempts of such an update")
LAST_STOP = _mean("last_stop_*", "share", "why the last completion ended, if there is any step")
ROLE_REWARD = _mean("role/*/reward_mean", "", "reward in another role of the policy (self-play)")
ROLE_STEPS = _mean("role/*/steps_mean", "steps", "LLM calls in that role, of attempts with any")
ROLE_TOKENS = _mean("role/*/completion_tokens_mean", "tokens", "sampled in that role")
STALENESS_MEAN = _mean("staleness_mean", "versions", "learner's version less the oldest that sampled a token")
STALENESS_MAX = Metric("staleness_max", "trajectory", "max", "versions", "largest such difference: the worst straggler")
ONE_VERSION = _mean("one_version", "share", "of one policy version alone; all with `training.lora.pin_attempts`")
VERSIONS = Metric("versions", "run", "max", "versions", "that sampled the update's trajectories, together")
TOKEN_STALENESS = Metric(
    "token_staleness_mean", "token", "mean", "versions", "learner's version less the one that sampled the token"
)
_TRAINED = "`staleness_mean` without dropped steps; at most `orchestration.max_staleness`"
TRAINED_STALENESS_MEAN = _mean("trained_staleness_mean", "versions", _TRAINED, view="trained")
TRAINED_STALENESS_MAX = Metric(
    "trained_staleness_max", "trajectory", "max", "versions", "largest such difference", view="trained"
)

# over all trajectories and their steps

TRAJECTORIES = Metric("trajectories", "trajectory", "sum", "trajectories", "played")
FAILED = Metric("failed", "trajectory", "sum", "trajectories", "without a reward; they enter no mean and no baseline")
FAILED_BY = Metric("failed_*", "trajectory", "sum", "trajectories", "the same by cause, of those that occur")
REFUSED = Metric(
    "refused", "trajectory", "sum", "trajectories", "graded, but the learner's model cannot train them", view="dropped"
)
WARNINGS = Metric("warnings", "trajectory", "sum", "trajectories", "with a warning")
BLOCKED = Metric(
    "blocked_seconds", "trajectory", "sum", "seconds", "user code held up the event loop, a second or more"
)
ENDED = _mean("ended_*", "share", "how it ended, failed ones too")
DROPPED = Metric(
    "dropped_*", "step", "sum", "steps", "recorded, but not trained, by reason, of those that occur", view="dropped"
)
REJECTED_SHARE = Metric("rejected_share", "step", "mean", "share", "answer was thrown away", view="dropped")
REJECTED_TOKENS = Metric("rejected_tokens", "step", "sum", "tokens", "sampled in such steps", view="dropped")
REPEATED = Metric(
    "repeated_replies", "step", "mean", "share", "of 8 tokens or more, three quarters of which are one and the same"
)

# over tasks with a graded trajectory

PASS_AT = Metric(
    "pass_at_*", "task", "mean", "share", "one of k attempts succeeds, estimated; of the same tasks for all k"
)
PASS_TASKS = Metric("pass_tasks", "task", "sum", "tasks", "those that `pass_at_*` is of: every attempt is graded")
EQUAL_REWARDS = Metric("equal_reward_groups", "task", "mean", "share", "all graded attempts were given the same reward")

# of the run

SECONDS = Metric(
    "seconds_*", "run", "sum", "seconds", "rollout, update, publish; a batch's, shared by its updates", view="run"
)
WALL_SECONDS = Metric("wall_seconds", "run", "max", "seconds", "of the run so far, over all its processes", view="run")
CPU_SECONDS = Metric("cpu_seconds", "run", "max", "seconds", "of this process, and those before it", view="run")
ABANDONED_THREADS = Metric(
    "abandoned_threads", "run", "max", "threads", "of user code, in calls that timed out and did not return", view="run"
)

DECLARED: tuple[Metric, ...] = (*declared(globals()), *declared(vars(training_metrics)))
"""All metrics of an update's row except the environment's."""


def mean(values: Sequence[float]) -> Figure:
    """Return the mean; None for no values, which is not 0."""
    return sum(values) / len(values) if values else None


def shown(value: Figure, digits: int = 3) -> str:
    """Return the value as text: `0.412`, or `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def shown_passes(passes: Mapping[str, Figure], tasks: int | None) -> list[str]:
    """Return `pass@1 0.250`, `pass@2 0.500 of 12 tasks`; without the number if a row of an earlier version lacks it."""
    figures = [f"pass@{k} {shown(value)}" for k, value in passes.items()]
    if figures and tasks is not None:
        figures[-1] += f" of {tasks} task{'' if tasks == 1 else 's'}"
    return figures


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Result of an evaluation: held-out tasks, played by one or several attempts each.

    attempts: number per task; failed: number left without a reward after all retries. success: share of graded
    attempts, None without any; by, by_tasks: the same, and the number of tasks with any, per value of `table_by`.
    metrics: the environment's, `env/<name>` -> value, over all attempts, and those of copies, `role/<role>/<name>`.
    pass_at: with several attempts, k -> estimated share of tasks with a success among k attempts, over the `pass_tasks`
    tasks with every attempt graded.

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
    metrics: dict[str, Figure] = field(default_factory=dict)
    attempts: int = 1
    pass_at: dict[str, Figure] = field(default_factory=dict)
    pass_tasks: int = 0


def trajectory_metrics(
    groups: Sequence[Group], attempts: int, success_at: float, version: int, success_of: str | None = None
) -> Measures:
    """Return the metrics of one update's groups.

    attempts: number per group, without retried ones. version: policy version before the update.
    """
    everyone = [t for group in groups for t in group.trajectories]
    graded = [t for t in everyone if t.reward is not None]
    versions = [step.policy_versions[step.mask] for t in graded for step in as_played(t).sampled]
    token_staleness = [version - sampled_by for part in versions for sampled_by in part.tolist()]
    return (
        _graded_metrics(graded, success_at, success_of, version)
        + _reward_metrics(graded)
        + _attempt_metrics(everyone)
        + measured("step", _counts(DROPPED, (step.reason for step in dropped_steps(groups))))
        + measured("step", _of_rejected([step for t in everyone for step in t.steps]))
        + measured(
            "step",
            {
                REPEATED: [
                    _repeats(s.completion_ids)
                    for t in everyone
                    for s in t.steps
                    if s.dropped is not DropReason.REPLAYED
                ]
            },
        )
        + _task_metrics(groups, attempts, success_at, success_of)
        + environment_metrics(everyone)
        + _role_metrics(everyone)
        + measured("token", {TOKEN_STALENESS: token_staleness})
    )


def environment_metrics(trajectories: Iterable[Trajectory]) -> Measures:
    """Return the metrics declared by the trajectories' environments, as `env/<name>`."""
    return sum((t.metrics for t in trajectories), Measures()).under("env/")


def _role_metrics(trajectories: Iterable[Trajectory]) -> Measures:
    """Return metrics of the copies with a reward, by role."""
    roles: dict[str, list[TrajectoryView]] = {}
    for copy in (copy for t in trajectories for copy in t.copies if copy.reward is not None):
        roles.setdefault(copy.role, []).append(as_played(copy))
    values: dict[Metric, Sequence[float]] = {}
    for role, views in sorted(roles.items()):
        values[ROLE_REWARD.of(role)] = [view.reward for view in views if view.reward is not None]
        values[ROLE_STEPS.of(role)] = [len(view.steps) for view in views]
        values[ROLE_TOKENS.of(role)] = [view.completion_tokens for view in views]
    return measured("trajectory", values)


def run_metrics(seconds: Mapping[str, float], wall: float, cpu: float, abandoned_threads: int) -> Measures:
    """Return the metrics of the run itself. seconds: by phase of the update. wall, cpu: seconds of the run so far."""
    phases = {SECONDS.of(phase): [value] for phase, value in seconds.items()}
    return measured("run", {**phases, WALL_SECONDS: [wall], CPU_SECONDS: [cpu], ABANDONED_THREADS: [abandoned_threads]})


def pass_at(k: int, attempts: int, successes: int) -> float:
    """Return pass@k = 1 - C(attempts - successes, k) / C(attempts, k), for 1 <= k <= attempts.

    This is the mean over all choices of k attempts of whether one succeeds, so unbiased. Source: Chen et al. 2021,
    "Evaluating large language models trained on code", eq. 1.
    """
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def _graded_metrics(graded: Sequence[Trajectory], success_at: float, success_of: str | None, version: int) -> Measures:
    views = [as_played(t) for t in graded]
    rewards = [view.reward for view in views if view.reward is not None]
    steps, tokens = [len(view.steps) for view in views], [view.completion_tokens for view in views]
    staleness, of_trained = _staleness(views, version), _staleness(map(as_trained, graded), version)
    sampled_by = [{int(v) for step in view.sampled for v in step.policy_versions} for view in views]
    values: dict[Metric, Sequence[float]] = {
        REWARD_MEAN: rewards,
        REWARD_POSITIVE: [reward > 0 for reward in rewards],
        SUCCESS: [is_success(t, success_at, success_of) for t in graded],
        STEPS_MEAN: steps,
        STEPS_MAX: steps,
        COMPLETION_TOKENS_MEAN: tokens,
        COMPLETION_TOKENS_MAX: tokens,
        PROMPT_TOKENS_MEAN: [view.prompt_tokens for view in views],
        COMPACTIONS: [sum(step.break_cause is BreakCause.SUMMARY for step in view.steps) for view in views],
        SUMMARY_TOKENS: [sum(len(step.completion_ids) for step in view.sampled if step.summary) for view in views],
        STALENESS_MEAN: staleness,
        STALENESS_MAX: staleness,
        ONE_VERSION: [len(versions) == 1 for versions in sampled_by if versions],
        TRAINED_STALENESS_MEAN: of_trained,
        TRAINED_STALENESS_MAX: of_trained,
        TRAJECTORY_SECONDS: [t.seconds for t in graded],
        ENGINE_SHARE: [t.engine_seconds / t.seconds for t in graded if t.seconds > 0],
        **shares(LAST_STOP, StopReason, [view.steps[-1].stop_reason for view in views if view.steps]),
        **_start_metrics(graded, success_at, success_of),
    }
    return measured("trajectory", values) + measured("run", {VERSIONS: [len(set().union(*sampled_by))]})


def _start_metrics(
    graded: Sequence[Trajectory], success_at: float, success_of: str | None
) -> dict[Metric, Sequence[float]]:
    """Return metrics of attempts that began in the middle of a recorded one; empty if none did."""
    replayed = [0 if t.start is None else t.start.steps for t in graded]
    if not any(replayed):
        return {}
    whole = [is_success(t, success_at, success_of) for t, steps in zip(graded, replayed, strict=True) if not steps]
    begun = [steps for steps in replayed if steps]
    return {STARTS: [steps > 0 for steps in replayed], START_STEPS: begun, WHOLE_SUCCESS: whole}


def _repeats(ids: Ids) -> bool:
    """Return whether a completion int32[C] is mostly one repeated token."""
    return len(ids) >= 8 and 4 * int(np.unique(ids, return_counts=True)[1].max()) >= 3 * len(ids)


def _of_rejected(steps: Sequence[Step]) -> dict[Metric, Sequence[float]]:
    rejected = [step.dropped is DropReason.REJECTED for step in steps]
    tokens = [len(step.completion_ids) for step, thrown in zip(steps, rejected, strict=True) if thrown]
    return {REJECTED_SHARE: rejected, REJECTED_TOKENS: tokens}


def _staleness(views: Iterable[TrajectoryView], version: int) -> list[int]:
    return [version - view.oldest_version for view in views if view.oldest_version is not None]


def _attempt_metrics(everyone: Sequence[Trajectory]) -> Measures:
    causes = [t.failure.cause for t in everyone if t.failure is not None]
    values: dict[Metric, Sequence[float]] = {
        TRAJECTORIES: [1] * len(everyone),
        FAILED: [1] * len(causes),
        REFUSED: [attempt_drop_reason(t) is DropReason.REFUSED for t in everyone],
        WARNINGS: [bool(t.warning) for t in everyone],
        BLOCKED: [t.blocked_seconds for t in everyone],
        **_counts(FAILED_BY, causes),
        **shares(ENDED, Status, [t.status for t in everyone]),
    }
    return measured("trajectory", values)


def _task_metrics(groups: Sequence[Group], attempts: int, success_at: float, success_of: str | None) -> Measures:
    graded = [[t for t in group.trajectories if t.reward is not None] for group in groups]
    passes = _passes([[is_success(t, success_at, success_of) for t in own] for own in graded], attempts)
    values: dict[Metric, Sequence[float]] = {
        EQUAL_REWARDS: [len({t.reward for t in own}) == 1 for own in graded if own],
        **{PASS_AT.of(k): each for k, each in passes.items()},
        PASS_TASKS: [1] * len(passes[1]),
    }
    return measured("task", values)


def _passes(successes: Sequence[Sequence[float]], attempts: int) -> dict[int, list[float]]:
    """Return k -> pass@k of each task with every attempt graded, for k = 1, 2, 4, ... and `attempts`.

    Including tasks with only k graded attempts would mix different tasks per k, and pass@k could fall as k grows.
    """
    whole = [int(sum(won)) for won in successes if len(won) == attempts]
    shown_for = sorted({*(2**n for n in range(attempts.bit_length())), attempts})
    return {k: [pass_at(k, attempts, won) for won in whole] for k in shown_for}


def _reward_metrics(graded: Sequence[Trajectory]) -> Measures:
    """Return metrics of rewards beyond their mean: named components, and the trained reward if shaping did anything."""
    rewards = [as_played(t).components for t in graded]
    names = sorted({name for components in rewards for name in components})
    values: dict[Metric, Sequence[float]] = {}
    if names not in ([], [PLAIN]):
        values |= {REWARD_COMPONENT.of(name): [c.get(name, 0.0) for c in rewards] for name in names}
    if any(attempt_drop_reason(t) is DropReason.OVERLONG or any(step.shaping for step in t.steps) for t in graded):
        values[SHAPED_REWARD] = [reward for t in graded if (reward := as_trained(t).reward) is not None]
    return measured("trajectory", values)


def _counts(family: Metric, keys: Iterable[object]) -> dict[Metric, list[int]]:
    """Return the number of occurrences of each key; absent keys have no entry, which counts as 0."""
    return {family.of(key): [1] * count for key, count in sorted(Counter(map(str, keys)).items())}


def kind_of(task: Task, table_by: str | None) -> str | None:
    """Return the value of the task's extra by which tables are split; None if it has none."""
    value = None if table_by is None else task.extras.get(table_by)
    return None if value is None else str(value)


def evaluation_result(
    groups: Sequence[Group],
    attempts: int,
    update: int,
    temperature: float,
    success_at: float,
    table_by: str | None,
    success_of: str | None = None,
) -> EvaluationResult:
    """Return the result of an evaluation.

    attempts: number per task, without retried ones. update: the last one before it. table_by: key of a task's extras.

    """
    graded = [[t for t in group.trajectories if t.reward is not None] for group in groups]
    everyone = [t for own in graded for t in own]
    successes = [[is_success(t, success_at, success_of) for t in own] for own in graded]
    parts: dict[str, list[list[float]]] = {}
    for group, won in zip(groups, successes, strict=True):
        if won and (kind := kind_of(group.task, table_by)) is not None:
            parts.setdefault(kind, []).append(won)
    passes = _passes(successes, attempts)
    return EvaluationResult(
        update=update,
        temperature=temperature,
        tasks=len(groups),
        failed=len(groups) * attempts - len(everyone),
        success=mean(list(chain(*successes))),
        reward_mean=mean([t.reward for t in everyone if t.reward is not None]),
        steps_mean=mean([len(as_played(t).steps) for t in everyone]),
        by={key: mean(list(chain(*parts[key]))) for key in sorted(parts)},
        by_tasks={key: len(parts[key]) for key in sorted(parts)},
        metrics=dict(environment_metrics(t for group in groups for t in group.trajectories) + _role_metrics(everyone)),
        attempts=attempts,
        pass_at={str(k): mean(each) for k, each in passes.items()} if attempts > 1 else {},
        pass_tasks=len(passes[1]),
    )


def is_success(trajectory: Trajectory, success_at: float, success_of: str | None) -> float:
    """Return 1 if the reward, or its component `success_of`, is at least `success_at`, else 0."""
    reached = as_played(trajectory).given(success_of)
    return float(reached is not None and reached >= success_at)
