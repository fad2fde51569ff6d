"""What a loop reports: rows of metrics, the progress of phases, and each problem once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from treadle.algorithms import estimators
from treadle.core.trainer import UpdateResult
from treadle.core.types import Group
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.callbacks import Callback
from treadle.orchestration.reporting.clock import Clock
from treadle.orchestration.reporting.metrics import run_metrics, trajectory_metrics
from treadle.orchestration.reporting.reward_notes import reward_notes
from treadle.orchestration.store.loop_state import LoopState
from treadle.rollout.isolation.user_code import abandoned_threads

_MOST_COMPLAINTS = 20  # of a run
_OF_BATCH = ("rollout", "update", "publish")


class Reporter:
    """Turns what happens in the loop into events of `callbacks`; decides nothing.

    seconds: of the phases of the current batch, by name.
    """

    def __init__(self, config: RunConfig, callbacks: Callback, clock: Clock) -> None:
        self.callbacks, self.clock = callbacks, clock
        self.seconds: dict[str, float] = {}
        self._config = config
        self._phase, self._done, self._total = "", 0, 0
        self._reported: set[str] = set()

    def begin(self, phase: str, total: int) -> None:
        """Report the start of a phase of `total` equal pieces."""
        self._phase, self._done, self._total = phase, 0, total
        self.callbacks.phase(phase, 0, total)

    def advance(self, phase: str) -> None:
        """Report that another piece of a phase is done, if that is the current one: rollouts may end during updates."""
        if phase == self._phase:
            self._done = min(self._done + 1, self._total)
            self.callbacks.phase(phase, self._done, self._total)

    @contextmanager
    def timed(self, phase: str, update: int) -> Iterator[None]:
        """Report the interval inside; if the phase is one of a batch, its seconds are in the rows of the next updates.

        update: the number of the batch's first one, or of the last that was made.
        """
        started, clock = time.time(), time.perf_counter()
        yield
        seconds = time.perf_counter() - clock
        if phase in _OF_BATCH:
            self.seconds[phase] = seconds
        self.callbacks.interval(
            {"kind": "interval", "update": update, "phase": phase, "started": started, "seconds": seconds}
        )

    def message(self, line: str) -> None:
        self.callbacks.message(line)

    def batch(self, groups: Sequence[Group], first: bool) -> None:
        """Report what is wrong with the attempts and rewards of a batch. first: it is the run's first."""
        self.failures(groups)
        for text in reward_notes(groups, self._config, estimators.by_name(self._config.algorithm.advantage), first):
            self._once(text, text)

    def failures(self, groups: Sequence[Group]) -> None:
        """Report each failure or warning, once."""
        for trajectory in (t for group in groups for t in group.trajectories):
            text = trajectory.failure.message if trajectory.failure else trajectory.warning
            self._once(text, f"task {trajectory.task_id}, trajectory {trajectory.trajectory_id}: {text}")

    def refusals(self, refused: Mapping[str, str]) -> None:
        """Report why trajectories could not be trained: trajectory_id -> why."""
        for why in refused.values():
            self._once(why, f"not trained: {why}")

    def _once(self, text: str, line: str) -> None:
        if text and text not in self._reported and len(self._reported) < _MOST_COMPLAINTS:
            self._reported.add(text)
            self.message(line)

    def updates(self, groups: Sequence[Group], results: Sequence[UpdateResult], state: LoopState) -> None:
        """Report a row of metrics for each update of a batch, about its own groups. state: before the batch."""
        size, section = self._config.training.tasks_per_update, self._config.evaluation
        phases = {phase: seconds / len(results) for phase, seconds in self.seconds.items()}
        self.seconds = {}
        of_run = run_metrics(phases, *self.clock.read(), len(abandoned_threads()))
        for number, result in enumerate(results):
            first = number * size % len(groups)  # each epoch goes through all groups
            played = trajectory_metrics(
                groups[first : first + size], section.success_at, state.version, section.success_of
            )
            row = {"kind": "update", "update": state.update + number + 1, "version": state.version}
            self.callbacks.update({**row, **(played + result.metrics + of_run)})
