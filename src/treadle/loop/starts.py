"""Where groups begin: a table of pass rates, and the recorded attempts in whose middle a group's attempts start.

    Groups.finish -> taken or dropped -(publication)-> Starts.learn     rates by (task, step), solved attempts
    RolloutScheduler -> Starts.prefix(group) -> Prefix | None           keyed by seed, epoch and position of the task
    TaskQueue -> Starts.draw(index, tasks)                              the curriculum, keyed by seed and index

All attempts of a group share its start, so that their baseline is of that state. The table changes only when weights
are published, and is part of the checkpoint with the choices of outstanding groups, so that a resumed run chooses as
the interrupted one did. With n_k discounted attempts from step k of a solved attempt of L steps, s_k of which passed,

    rate(k) = (PRIOR exp(-a (L - k)) + s_k) / (PRIOR + n_k)

where a, one number per task, makes the counts most probable if every step passed with the same probability exp(-a). A
task of which nothing is known begins where half of the attempts at the others pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.core.draws import Stream, task_uniforms
from treadle.core.errors import ConfigError, DataError, TreadleError
from treadle.core.outcomes import leave_out
from treadle.core.registry import resolve
from treadle.core.trainer import ConversationCall
from treadle.core.types import DropReason, Group, SamplingParams, Start, Step, StopReason, Task, Trajectory
from treadle.loop.config import LoopPlan
from treadle.rendering.chat import ChatRenderer
from treadle.report.metrics import is_success
from treadle.rollout.replay import Prefix
from treadle.training.demonstrations import checked_demonstration, demonstrated_calls

DISCOUNT = 0.7
"""Factor of a task's counts with each of its later groups: the policy changes."""
COMMON_DISCOUNT = 0.98
"""The same of the counts of all tasks together, with each group."""
PRIOR = 4.0
"""Attempts that one rate for all steps is worth beside counts of the step itself."""
LEAST = 0.1
"""Share of the curriculum's groups that are drawn uniformly."""

NOTHING: Mapping[str, Any] = MappingProxyType({})
_CACHED = 256  # sources with their steps in memory

Demonstrated = Callable[[Task], tuple[str, Sequence[Step]] | None]
"""Task -> name and steps of a demonstration of it, if there is one."""
Weights = Callable[[Sequence[Task], Mapping[str, float]], Sequence[float]]
"""Tasks, rates by task_id of those sampled so far -> weights of the tasks, at least 0."""


@dataclass(slots=True)
class TaskRates:
    """What is known of one task.

    source, length: the recorded attempt that starts are taken from, "" without one, and its steps. counts: step ->
    [attempts, passed], discounted. is_lost: an attempt did not repeat the observations; no more starts.
    """

    source: str = ""
    length: int = 0
    counts: dict[int, list[float]] = field(default_factory=dict)
    is_lost: bool = False

    def add(self, step: int, attempts: int, passed: int) -> None:
        for count in self.counts.values():
            count[:] = [DISCOUNT * count[0], DISCOUNT * count[1]]
        before = self.counts.setdefault(step, [0.0, 0.0])
        before[:] = [before[0] + attempts, before[1] + passed]

    def rates(self, half: float | None = None) -> list[float]:
        """Return the estimated pass rate from each step of the source; only from step 0 without one.

        half: steps over which half of the attempts pass at other tasks; None: unknown, half of this task's.
        """
        length = max(self.length, 1)
        seen = {length - step: (n, s) for step, (n, s) in self.counts.items() if step < length}
        decay = _decay(seen, length / 2 if half is None else half)
        return [
            (PRIOR * math.exp(-decay * (length - step)) + s) / (PRIOR + n)
            for step in range(length)
            for n, s in [self.counts.get(step, (0.0, 0.0))]
        ]

    def best_step(self, target: float, half: float | None = None) -> int:
        """Return the step with the rate nearest to the target, the earliest of several; 0 if step 0 has as high a rate,
        or if there can be no start.
        """
        rates = self.rates(half)
        if not self.source or self.is_lost or rates[0] >= target:
            return 0
        return min(range(len(rates)), key=lambda step: abs(rates[step] - target))


def _decay(counts: Mapping[int, Sequence[float]], half: float) -> float:
    """Return the most probable a, given steps left -> (attempts, passed), if a pass over m steps has rate exp(-a m).

    One attempt more, which half passes over `half` steps, keeps it finite, and stands alone before anything is known.
    """
    seen = [*counts.items(), (max(half, 0.5), (1.0, 0.5))]

    def slope(a: float) -> float:
        return sum(m * ((n - s) / math.expm1(min(a * m, 700.0)) - s) for m, (n, s) in seen)

    low, high = 1e-6, 20.0
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return low


def informativeness(rate: float) -> float:
    """Return 4 r (1 - r): 1 for a rate of a half, 0 if attempts never differ."""
    return 4 * rate * (1 - rate)


class Starts:
    """The table, its draws and choices, of one run.

    read: steps of a recorded training trajectory, by id; raises TreadleError. demonstrated: demonstrations; None: the
    run's own attempts. state: as `state` returned it.
    """

    def __init__(
        self,
        plan: LoopPlan,
        read: Callable[[str], Sequence[Step]],
        demonstrated: Demonstrated | None = None,
        state: Mapping[str, Any] = NOTHING,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._plan, self._config, self._curriculum = plan, plan.starts, plan.curriculum
        self._read, self._demonstrated, self._log = read, demonstrated, log
        self._steps: dict[str, Sequence[Step]] = {}  # of the sources, a cache
        self._weights: NDArray[np.float64] | None = None  # of all tasks, until the table changes
        self._information: dict[str, float] = {}  # of tasks with results, until these change
        self._tasks = {name: _rates(row) for name, row in state.get("tasks", {}).items()}
        self._chosen = {int(n): Start(**start) if start else None for n, start in state.get("chosen", {}).items()}
        self._common = {int(left): list(count) for left, count in state.get("common", {}).items()}  # of all tasks
        self._drawn = {int(n): int(position) for n, position in state.get("drawn", {}).items()}

    @property
    def is_on(self) -> bool:
        return self._config is not None or self._curriculum != "uniform"

    def state(self, outstanding: Sequence[int]) -> dict[str, Any]:
        """Return the table, and the choices of outstanding groups, as JSON data; empty if nothing uses them."""
        if not self.is_on:
            return {}
        chosen = {str(n): asdict(s) if (s := self._chosen[n]) else None for n in outstanding if n in self._chosen}
        return {
            "tasks": {name: asdict(rates) for name, rates in self._tasks.items()},
            "common": {str(left): list(count) for left, count in self._common.items()},
            "chosen": chosen,
            "drawn": {str(n): self._drawn[n] for n in outstanding if n in self._drawn},
        }

    # --- the choice of a start -----------------------------------------------------------------------------------

    def prefix(self, group: Group) -> Prefix | None:
        """Return the start of a group that begins or goes on; None: the beginning.

        That of its recorded attempts, if there are any; chosen before, if it is an outstanding one of a resumed run.
        """
        if self._config is None:
            return None
        if group.trajectories:
            start = next((t.start for t in group.trajectories if t.start is not None), None)
        elif group.index in self._chosen:
            start = self._chosen[group.index]
        else:
            start = self._choose(group)
        prefix = None if start is None else self._opened(group.task, start)
        self._chosen[group.index] = None if prefix is None else prefix.start
        return prefix

    def _choose(self, group: Group) -> Start | None:
        assert self._config is not None
        if not self._plan.may_start(group.task):
            return None
        address = (self._plan.seed, Stream.START, group.epoch, group.position)
        if float(task_uniforms(*address)) >= self._config.share:
            return None
        rates = self._rates_of(group.task)
        step = rates.best_step(self._config.target, self._half())
        return Start(rates.source, step) if step else None

    def _opened(self, task: Task, start: Start) -> Prefix | None:
        """Read the steps of a start. If that fails, the task has no starts any more, which is logged."""
        try:
            steps = self._steps.get(start.source)
            if steps is None:
                found = self._demonstrated(task) if self._demonstrated is not None else None
                steps = self._cached(start.source, self._read(start.source) if found is None else found[1])
            return Prefix.of(start.source, steps, start.steps)
        except TreadleError as error:
            self._log(f"task {task.task_id} begins at step 0: {error}")
            self._rates_of(task).is_lost = True
            return None

    def _cached(self, source: str, steps: Sequence[Step]) -> Sequence[Step]:
        self._steps[source] = steps
        if len(self._steps) > _CACHED:
            del self._steps[next(iter(self._steps))]
        return steps

    def _rates_of(self, task: Task) -> TaskRates:
        if task.task_id in self._tasks:
            return self._tasks[task.task_id]
        rates = TaskRates()
        if self._demonstrated is not None and (found := self._demonstrated(task)) is not None:
            rates.source, rates.length = found[0], len(found[1])
            self._cached(*found)
        return self._tasks.setdefault(task.task_id, rates)

    # --- the table -----------------------------------------------------------------------------------------------

    def whole(self, group: Group) -> Group:
        """Leave out the fewer of a finished group's attempts that began elsewhere than the others (`diverged`).

        Attempts whose start was dropped have another baseline.
        """
        started = [t.trajectory_id for t in group.trajectories if t.start is not None]
        if self._chosen.get(group.index) is None or len(started) in (0, len(group.trajectories)):
            return group
        others = [t.trajectory_id for t in group.trajectories if t.start is None]
        return leave_out(group, DropReason.DIVERGED, others if len(others) <= len(started) else started)

    def learn(self, groups: Sequence[Group]) -> None:
        """Take in settled groups, in order: those of a trained batch, and those dropped meanwhile."""
        if not self.is_on:
            return
        for group in groups:
            start = self._chosen.pop(group.index, None)
            self._drawn.pop(group.index, None)
            rates = self._rates_of(group.task)
            graded = [t for t in group.trajectories if t.reward is not None]
            if start is not None and any(t.start is None for t in group.trajectories):
                rates.is_lost = True
            if same := [t for t in graded if t.start == start]:
                step, passed = 0 if start is None else start.steps, sum(map(self._has_passed, same))
                rates.add(step, len(same), passed)
                if rates.source:
                    self._add_common(rates.length - step, len(same), passed)
            if self._config is not None and self._demonstrated is None:
                for trajectory in filter(self._has_passed, graded):
                    self._offer(rates, trajectory)
            self._information.pop(group.task.task_id, None)
        self._weights = None

    def _add_common(self, left: int, attempts: int, passed: int) -> None:
        self._common = {m: [COMMON_DISCOUNT * n, COMMON_DISCOUNT * s] for m, (n, s) in self._common.items()}
        before = self._common.get(left, [0.0, 0.0])
        self._common[left] = [before[0] + attempts, before[1] + passed]

    def _half(self) -> float | None:
        """Return the steps over which half of the attempts at all tasks pass, as far as these show."""
        return math.log(2) / _decay(self._common, max(self._common) / 2) if self._common else None

    def _has_passed(self, trajectory: Trajectory) -> bool:
        section = self._plan.evaluation
        return is_success(trajectory, section.success_at, section.success_of) > 0

    def _offer(self, rates: TaskRates, trajectory: Trajectory) -> None:
        """Make a solved attempt the task's source, if it has none or a longer one."""
        length = len(trajectory.steps)
        if length < 2 or trajectory.copies or (rates.source and length >= rates.length):
            return
        try:
            Prefix.of(trajectory.trajectory_id, trajectory.steps, length - 1)
        except DataError:
            return
        self._steps.pop(rates.source, None)
        rates.source, rates.length = trajectory.trajectory_id, length
        rates.counts = {step: count for step, count in rates.counts.items() if step == 0}
        self._cached(rates.source, trajectory.steps)

    # --- the curriculum ------------------------------------------------------------------------------------------

    def draw(self, index: int, tasks: Sequence[Task], first: int, end: int) -> int | None:
        """Return the position of the group's task among tasks [first, end); None without a curriculum."""
        if self._curriculum == "uniform":
            return None
        if index not in self._drawn:
            if self._weights is None:
                self._weights = self._weigh(tasks)
            weights, size = self._weights[first:end], end - first
            shares = weights / weights.sum() if weights.any() else np.full(size, 1 / size)
            shares = (1 - LEAST) * shares + LEAST / size
            drawn = float(task_uniforms(self._plan.seed, Stream.CURRICULUM, index, 0))
            self._drawn[index] = first + min(int(np.searchsorted(np.cumsum(shares), drawn, "right")), size - 1)
        return self._drawn[index]

    def _weigh(self, tasks: Sequence[Task]) -> NDArray[np.float64]:
        if self._curriculum == "informative":
            return np.array([self._informed(task.task_id) for task in tasks], np.float64)
        known = {name: rates.rates()[0] for name, rates in self._tasks.items() if rates.counts}
        weights = np.asarray(load_curriculum(self._curriculum)(tasks, known), np.float64)
        if weights.shape != (len(tasks),) or not (np.isfinite(weights) & (weights >= 0)).all():
            raise ConfigError(
                f"data.curriculum: {self._curriculum!r} must return {len(tasks)} finite weights of at least 0, one per "
                f"task, got {weights!r:.100}"
            )
        return weights

    def _informed(self, task_id: str) -> float:
        """Return the most informative rate among those that the task's groups may begin with; 1 if none is known."""
        if task_id not in self._information and (rates := self._tasks.get(task_id)) is not None and rates.counts:
            of_steps = rates.rates()  # of its own counts alone, as they are cached
            can_start = self._config is not None and not rates.is_lost
            self._information[task_id] = max(map(informativeness, of_steps if can_start else of_steps[:1]))
        return self._information.get(task_id, 1.0)


def _rates(row: Mapping[str, Any]) -> TaskRates:
    rates = TaskRates(**row)
    return replace(rates, counts={int(step): list(count) for step, count in rates.counts.items()})


def load_curriculum(name: str) -> Weights:
    """Return the function of `data.curriculum`. Raises ConfigError."""
    weights: Weights = resolve("curricula", name, "data.curriculum")
    if not callable(weights):
        raise ConfigError(
            f"data.curriculum: {name!r} is of type {type(weights).__name__}; write def weights(tasks, rates), which "
            "returns a weight per task"
        )
    return weights


def load_demonstrated(source: str, renderer: ChatRenderer) -> Demonstrated | None:
    """Return the demonstrations of `rollout.starts.source`; None for the run's own attempts.

    A file of trajectories (by `treadle export-traces`, or conversations with a `task_id`), or a function that returns a
    task's conversation, `def solved(task)`. Raises ConfigError or DataError.
    """
    if source == "own":
        return None
    if Path(source).suffix in (".jsonl", ".json", ".parquet"):
        from treadle.record.recorded import RecordedTrajectory  # pyarrow
        from treadle.record.trajectory_files import read_files

        by_task: dict[str, tuple[str, Sequence[Step]]] = {}
        for row in read_files(Path(source)):
            if row.reward is not None and row.reward <= 0:
                continue
            recorded = row.trajectory.steps if isinstance(row, RecordedTrajectory) else ()
            steps = recorded or tuple(map(_as_step, row.calls(renderer)))
            if row.task_id not in by_task or len(steps) < len(by_task[row.task_id][1]):
                by_task[row.task_id] = row.source, steps
        if not by_task:
            raise DataError(f"rollout.starts.source: {source} has no trajectory with a reward above 0")
        return lambda task: by_task.get(task.task_id)
    made = resolve("demonstrations", source, "rollout.starts.source")

    def demonstrated(task: Task) -> tuple[str, Sequence[Step]] | None:
        if (conversation := made(task)) is None:
            return None
        name = f"{source} of {task.task_id}"
        shown = checked_demonstration(conversation, name)
        return name, tuple(map(_as_step, demonstrated_calls(shown.messages, renderer, shown.tools)))

    return demonstrated


def _as_step(call: ConversationCall) -> Step:
    """Return a demonstrated call as a step that is only context: nobody sampled it, its log-probabilities are all 0 and
    mean nothing, and no token of it is trainable.
    """
    prompt, completion, *images = call
    count = len(completion)
    return Step(
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=np.zeros(count, np.float32),
        policy_versions=np.zeros(count, np.int32),
        sampling=SamplingParams(max_tokens=max(count, 1)),
        stop_reason=StopReason.STOP,
        mask=np.zeros(count, np.bool_),
        images=tuple(images),
    )
