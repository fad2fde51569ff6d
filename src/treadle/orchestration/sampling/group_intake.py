"""Where played attempts and groups come in: recorded, counted, and trained or dropped."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.algorithms.dynamic_sampling import has_zero_advantage
from treadle.core.outcomes import leave_out, reject_reason
from treadle.core.types import DropReason, Group
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.reporter import Reporter
from treadle.orchestration.sampling.failures import fails_by_task
from treadle.orchestration.sampling.quarantine import TaskQuarantine
from treadle.orchestration.sampling.replay_buffer import ReplayBuffer
from treadle.orchestration.sampling.stop_conditions import (
    StopConditionMet,
    WindowStats,
    check_discard_rate,
    check_failure_rate,
)
from treadle.orchestration.store.loop_state import LoopState
from treadle.orchestration.store.run_store import RunStore
from treadle.rollout.drivers.gateway import BAD_REQUESTS


@dataclass(frozen=True, slots=True)
class Batch:
    """Holds the groups of a batch as they are trained. window: what came in since the batch before."""

    groups: list[Group]
    window: WindowStats


class GroupIntake:
    """Makes attempts durable, and puts the groups that can be trained into the buffer."""

    def __init__(
        self, config: RunConfig, store: RunStore, buffer: ReplayBuffer, quarantine: TaskQuarantine, reporter: Reporter
    ) -> None:
        self._config, self._store, self._buffer = config, store, buffer
        self._quarantine, self._reporter = quarantine, reporter
        self._window = WindowStats()  # since the last batch was taken

    async def attempt(self, part: Group, version: int, retried: bool) -> None:
        """Record a group's newly finished attempt. version: of the moment. retried: another one takes its place."""
        await self._store.record(part, version)
        if retried:
            return
        self._window.trajectories += len(part.trajectories)
        self._window.failures.update((t.failure.cause, t.failure.message) for t in part.trajectories if t.failure)
        self._window.bad_requests.update(t.warning for t in part.trajectories if t.metrics.get(BAD_REQUESTS.name))
        self._reporter.advance("rollout")

    async def settled(self) -> None:
        """Wait for attempts that are being recorded, also if those who waited for them were cancelled."""
        await self._store.settled()

    def group(self, group: Group) -> None:
        """Decide what becomes of a group of which all attempts have come in."""
        self._window.groups += 1
        reason = self._reject_reason(group)
        if reason is None:
            self._buffer.finish(group)
        else:
            self._buffer.drop(group)
            self._discard(group, reason)

    def batch(self, state: LoopState) -> Batch | None:
        """Return the next batch, or None while there are too few groups.

        Raises StopConditionMet if too much has failed or was discarded to wait for more.
        """
        for group in self._buffer.drop_stale(state.version):
            self._discard(group, DropReason.STALE)
        groups = self._buffer.take(self._config.groups_per_batch, state.version)
        if groups is None:
            check_failure_rate(self._window, self._config, state.update + 1)
            check_discard_rate(self._window, self._config, state.update + 1)
            return None
        window, self._window = self._window, WindowStats()
        if self._config.algorithm.dynamic_sampling == "replace":
            groups = [leave_out(g, DropReason.FILTERED) if self._has_zero_advantage(g) else g for g in groups]
        return Batch(groups, window)

    def no_task_left(self) -> StopConditionMet:
        """Return the error for a run whose tasks are all in quarantine."""
        return StopConditionMet(
            "every task is left out: its last groups had too few graded attempts (failures.task_limit is "
            f"{self._config.failures.task_limit}, training.min_group_size {self._config.min_group_size})"
        )

    def _reject_reason(self, group: Group) -> DropReason | None:
        least = self._config.min_group_size
        reason = reject_reason(group, least)
        if reason is DropReason.FAILED:
            if fails_by_task(group, self._config.training.group_size, least):
                self._count_failure(group, least)
            self._reporter.failures([group])
            return reason
        self._quarantine.clear(group.task)
        filtering = reason is None and self._config.algorithm.dynamic_sampling == "filter"
        return DropReason.FILTERED if filtering and self._has_zero_advantage(group) else reason

    def _count_failure(self, group: Group, least: int) -> None:
        if self._quarantine.count_failure(group.task):
            failed = self._quarantine.failed_groups[group.task.task_id]
            what = f"its last {failed} groups had fewer than {least} graded attempts"
            self._reporter.message(f"task {group.task.task_id} is left out: {what}")

    def _has_zero_advantage(self, group: Group) -> bool:
        return has_zero_advantage(group, self._config.algorithm)

    def _discard(self, group: Group, reason: DropReason) -> None:
        self._window.discarded[reason] += 1
        self._store.ledger.note_dropped(leave_out(group, reason))
