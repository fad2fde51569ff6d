"""Reports of a loop: rows of metrics, progress of phases, each problem once; and the run's summary.json."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from treadle.algorithms import estimators
from treadle.algorithms.estimators import Advantage
from treadle.core.outcomes import as_played
from treadle.core.trainer import UpdateResult
from treadle.core.types import Group
from treadle.record.ledger_reader import LoopState
from treadle.report.callback import Callback
from treadle.report.metrics import run_metrics, trajectory_metrics
from treadle.report.rewards import Grading, lone_attempts, unknown_components
from treadle.rollout.isolation.user_code import abandoned_threads

_MOST_COMPLAINTS = 20  # per run
_OF_BATCH = ("rollout", "update", "publish")


class Reporter:
    """Turns events of the loop into events of `callbacks`. seconds: durations of the batch's phases, by name."""

    def __init__(self, grading: Grading, callbacks: Callback, clock: Clock) -> None:
        self.callbacks, self.clock = callbacks, clock
        self.seconds: dict[str, float] = {}
        self._grading = grading
        self._phase, self._done, self._total = "", 0, 0
        self._reported: set[str] = set()

    def begin(self, phase: str, total: int) -> None:
        self._phase, self._done, self._total = phase, 0, total
        self.callbacks.phase(phase, 0, total)

    def advance(self, phase: str) -> None:
        """Report that another piece of a phase is done, if it is the current one: rollouts may end during updates."""
        if phase == self._phase:
            self._done = min(self._done + 1, self._total)
            self.callbacks.phase(phase, self._done, self._total)

    @contextmanager
    def timed(self, phase: str, update: int) -> Iterator[None]:
        """Report the interval inside; for a phase of a batch, its seconds are included in the rows of the next updates.

        update: number of the batch's first one, or of the last one made.
        """
        with interval(self.callbacks, phase, update) as row:
            yield
        if phase in _OF_BATCH:
            self.seconds[phase] = row["seconds"]

    def batch(self, groups: Sequence[Group], first: bool) -> None:
        """Report problems of a batch's attempts and rewards. first: whether it is the run's first batch."""
        self.failures(groups)
        for text in reward_notes(groups, self._grading, estimators.by_name(self._grading.advantage), first):
            self._once(text, text)

    def failures(self, groups: Sequence[Group]) -> None:
        for trajectory in (t for group in groups for t in group.everyone):
            text = trajectory.failure.message if trajectory.failure else trajectory.warning
            self._once(text, f"task {trajectory.task_id}, trajectory {trajectory.trajectory_id}: {text}")

    def refusals(self, refused: Mapping[str, str]) -> None:
        for why in refused.values():
            self._once(why, f"not trained: {why}")

    def _once(self, text: str, line: str) -> None:
        if text and text not in self._reported and len(self._reported) < _MOST_COMPLAINTS:
            self._reported.add(text)
            self.callbacks.message(line)

    def updates(self, groups: Sequence[Group], results: Sequence[UpdateResult], state: LoopState) -> None:
        """Report a row of metrics for each update of a batch, over its own groups. state: before the batch."""
        grading = self._grading
        phases = {phase: seconds / len(results) for phase, seconds in self.seconds.items()}
        self.seconds = {}
        of_run = run_metrics(phases, *self.clock.read(), len(abandoned_threads()))
        for number, result in enumerate(results):
            # Each epoch goes through all groups.
            first = number * grading.tasks_per_update % len(groups)
            own = groups[first : first + grading.tasks_per_update]
            played = trajectory_metrics(own, grading.group_size, grading.success_at, state.version, grading.success_of)
            row = {"kind": "update", "update": state.update + number + 1, "version": state.version}
            self.callbacks.update({**row, **(played + result.metrics + of_run)})


@contextmanager
def interval(callbacks: Callback, phase: str, update: int) -> Iterator[dict[str, Any]]:
    """Report start and duration of the phase inside: the yielded row, complete at the end."""
    row = {"kind": "interval", "update": update, "phase": phase, "started": time.time()}
    clock = time.perf_counter()
    yield row
    row["seconds"] = time.perf_counter() - clock
    callbacks.interval(row)


@dataclass(slots=True)
class Clock:
    """Measures wall-clock and CPU seconds of a run. wall_before, cpu_before: seconds of its earlier processes."""

    wall_before: float = 0.0
    cpu_before: float = 0.0
    _wall: float = field(default_factory=time.perf_counter)
    _cpu: float = field(default_factory=time.process_time)

    def read(self) -> tuple[float, float]:
        return (self.wall_before + time.perf_counter() - self._wall, self.cpu_before + time.process_time() - self._cpu)


def reward_notes(groups: Sequence[Group], grading: Grading, advantage: Advantage, first: bool) -> Iterator[str]:
    """Yield a line for reward details ignored by the advantage; in the run's first batch, for unknown components."""
    trajectories = [t for group in groups for t in group.everyone]
    name = grading.advantage
    early = any(step.reward or step.shaping for t in trajectories for step in as_played(t).steps[:-1])
    if early and not advantage.by_step:
        yield (
            f"the environment rewards single steps, but algorithm.advantage {name} "
            "only uses their sum; step_return, gigpo and reinforce++ use the time of each reward"
        )
    by_token = any(step.given.tokens is not None for t in trajectories for step in as_played(t).steps)
    if by_token and not advantage.by_token:
        yield (
            f"there are rewards of single tokens, but algorithm.advantage {name} "
            f"only uses the sum over a {'step' if advantage.by_step else 'trajectory'}; reinforce++ and gae use each"
        )
    if first:
        yield from unknown_components(trajectories, grading, "the first batch")
    if first and grading.held_out:
        yield from lone_attempts(grading)


def run_summary(
    run: Path,
    state: LoopState,
    *,
    recipe: str,
    seed: int,
    temperature: float,
    weights_sha256: str,
    stopped_early: bool,
    warm_start: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the content of summary.json; held-out figures are at `temperature`, with greedy ones beside them."""
    sampled = [e for e in state.evaluations if e["temperature"] == temperature]
    greedy = [e for e in state.evaluations if e["temperature"] == 0]

    last = state.evaluations[-1]["update"] if state.evaluations and not stopped_early else 0

    def before(results: list[dict[str, Any]]) -> float | None:
        return results[0]["success"] if results and results[0]["update"] == 0 else None

    # Missing if it was switched off, or changed, on a resume.
    def after(results: list[dict[str, Any]]) -> float | None:
        return results[-1]["success"] if results and 0 < results[-1]["update"] == last else None

    return {
        "run": str(run),
        "recipe": recipe,
        "seed": seed,
        "updates": state.update,
        "stopped_early": stopped_early,
        "held_out_success_before": before(sampled),
        "held_out_success_after": after(sampled),
        "held_out_greedy_before": before(greedy),
        "held_out_greedy_after": after(greedy),
        "held_out_tasks": sampled[0]["tasks"] if sampled else 0,
        "evaluations": list(state.evaluations),
        "warm_start": warm_start,
        "threads": torch.get_num_threads(),
        "wall_seconds": round(state.wall_seconds, 1),
        "cpu_seconds": round(state.cpu_seconds, 1),
        "weights_sha256": weights_sha256,
    }
