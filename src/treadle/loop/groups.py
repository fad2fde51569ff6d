"""The life of a group, from a task to the weights.

    queued -start-> sampling -finish-> recorded -> ready -take-> training -trained-> trained
                                          |          |
                                          +----------+--> dropped(failed, overlong, filtered | stale)

    queued      in the `TaskQueue`
    sampling    its attempts are played and retried by the `RolloutScheduler`; each is recorded as soon as it ends or,
                with `rewards.group`, once they are rewarded together
    recorded    all attempts are recorded; it immediately becomes ready or dropped
    ready       waits for the trainer; steps may become stale meanwhile
    training    in a batch, until its weights are published
    trained, dropped    only in the record; another queued group takes its place

Who waits, and who wakes it:

    the loop        waits for `arrived`, for enough ready groups; woken by each group that becomes ready or dropped
    queued groups   wait for room: (1 + max_staleness) * groups_per_batch groups from sampling to training. The
                    scheduler checks when an attempt or a group ends, a batch is requested, or weights are published
    engines         never wait: publications reach them between two tokens (at max_staleness 0 they are idle then)

For example, at max_staleness 1 and two groups per batch, groups 0 to 3 start with version 0. 1 and 3 become ready and
are trained; when version 1 is published, they leave and 4 and 5 start, while 0 and 2 continue: trained by the next
update, their tokens are one version old. At max_staleness 0 only 0 and 1 start, then 2 and 3 with version 1, and so on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from treadle.algorithms.estimators import has_zero_advantage
from treadle.core.outcomes import leave_out, reject_reason, trains, without_stale
from treadle.core.types import DropReason, Group
from treadle.loop.config import LoopPlan
from treadle.loop.failures import fails_by_task
from treadle.loop.starts import Starts
from treadle.loop.stopping import WindowStats, check_discard_rate, check_failure_rate
from treadle.loop.task_queue import TaskQueue
from treadle.record.ledger_reader import LoopState
from treadle.record.run_store import RunStore
from treadle.report.reporter import Reporter
from treadle.rollout.drivers.gateway import BAD_REQUESTS

State = Literal["sampling", "ready", "training"]


@dataclass(slots=True)
class _Tracked:
    """version: version that the group started with; none of its tokens is older."""

    state: State
    version: int
    group: Group


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups for one update batch. window: statistics since the previous batch."""

    groups: list[Group]
    window: WindowStats


class Groups:
    """The groups from sampling to training, and the decision to train or drop each, with the reason.

    Steps whose oldest token would be more than `max_staleness` versions old when trained are left out (`stale_policy`
    mask_steps), or their group is dropped (drop_group), or no batch precedes older groups (wait).

    Invariant: a group is in one state; groups taken for training have no live stale step.
    """

    def __init__(
        self, plan: LoopPlan, queue: TaskQueue, store: RunStore, reporter: Reporter, starts: Starts | None = None
    ) -> None:
        self._plan, self._queue, self.store, self._reporter = plan, queue, store, reporter
        self.starts, self._dropped = starts or Starts(plan, store.steps), list[Group]()  # since the last publication
        self._max_staleness, self._stale_policy = plan.max_staleness, plan.stale_policy
        self._tracked: dict[int, _Tracked] = {}  # by index
        self._window = WindowStats()  # since the last batch was taken
        self.arrived = asyncio.Event()  # set when a group becomes ready or is dropped after the last call of `take`

    @property
    def sampling(self) -> int:
        return len(self._in("sampling"))

    @property
    def ready(self) -> int:
        return len(self._in("ready"))

    @property
    def under_way(self) -> int:
        """Number of started groups not trained yet."""
        return len(self._tracked)

    @property
    def outstanding(self) -> tuple[int, ...]:
        return tuple(sorted(index for index, tracked in self._tracked.items() if tracked.state != "training"))

    def start(self, group: Group, version: int) -> None:
        """queued -> sampling."""
        self._tracked[group.index] = _Tracked("sampling", version, group)

    async def record(self, part: Group, version: int, retried: bool) -> None:
        """Record a group's newly finished attempts. version: the latest. retried: whether others replace them."""
        await self.store.record(part, version)
        if retried:
            return
        self._window.trajectories += len(part.trajectories)
        self._window.failures.update(t.failure for t in part.trajectories if t.failure)
        self._window.bad_requests.update(t.warning for t in part.trajectories if t.metrics.get(BAD_REQUESTS.name))
        for _ in part.trajectories:
            self._reporter.advance("rollout")

    def finish(self, group: Group) -> None:
        """sampling -> recorded -> ready or dropped. group: including all attempts."""
        self._window.groups += 1
        group = self.starts.whole(group)
        if reason := self._drop_reason(group):
            self._drop(group, reason)
        else:
            tracked = self._tracked[group.index]
            tracked.state, tracked.group = "ready", group
        self.arrived.set()

    def next_batch(self, state: LoopState) -> Batch | None:
        """Return the next batch; None while too few groups are ready.

        Raises StopConditionMet if too many have failed or were discarded to continue waiting.
        """
        self.drop_stale(state.version)
        groups = self.take(state.version)
        if groups is None:
            check_failure_rate(self._window, self._plan, state.update + 1)
            check_discard_rate(self._window, self._plan, state.update + 1)
            return None
        window, self._window = self._window, WindowStats()
        algorithm = self._plan.algorithm
        if algorithm.dynamic_sampling == "replace":
            groups = [leave_out(g, DropReason.FILTERED) if has_zero_advantage(g, algorithm) else g for g in groups]
        return Batch(groups, window)

    def drop_stale(self, version: int) -> None:
        """Mark the steps that are stale for training at this version; drop groups with nothing left."""
        oldest = version - self._max_staleness
        for tracked in self._in("ready"):
            if tracked.version >= oldest:
                continue
            fresh = without_stale(tracked.group, oldest)
            if fresh is not tracked.group and (self._stale_policy == "drop_group" or not trains(fresh)):
                self._drop(tracked.group, DropReason.STALE)
            else:
                tracked.group = fresh

    def take(self, version: int) -> list[Group] | None:
        """ready -> training for the earliest started groups: a batch in order of submission; None if too few.

        version: version to be trained; `drop_stale` has been called for it.
        """
        self.arrived.clear()
        size = self._plan.groups_per_batch
        batch = sorted(self._in("ready"), key=lambda tracked: (tracked.version, tracked.group.index))[:size]
        if len(batch) < size or (self._stale_policy == "wait" and self._too_early(batch[-1].version, version)):
            return None
        for tracked in batch:
            tracked.state = "training"
        return sorted((tracked.group for tracked in batch), key=lambda group: group.index)

    def trained(self) -> None:
        """training -> trained: the batch's weights are published, and pass rates are counted."""
        taken = [tracked.group for tracked in self._in("training")]
        self.starts.learn(sorted([*taken, *self._dropped], key=lambda group: group.index))
        self._dropped.clear()
        self._tracked = {index: tracked for index, tracked in self._tracked.items() if tracked.state != "training"}

    def _too_early(self, newest: int, version: int) -> bool:
        """Return whether groups being sampled would become stale if a batch with one started at `newest` went first.

        Groups that started later, or already wait, cannot be better off; of groups started at version s, one batch at a
        time can be trained up to version s + max_staleness.
        """
        size = self._plan.groups_per_batch
        older = sorted(tracked.version for tracked in self._in("sampling") if tracked.version < newest)
        return any(n >= (started + self._max_staleness - version) * size for n, started in enumerate(older))

    def _in(self, state: State) -> list[_Tracked]:
        return [tracked for tracked in list(self._tracked.values()) if tracked.state == state]  # from any thread

    def _drop_reason(self, group: Group) -> DropReason | None:
        least = self._plan.min_group_size
        reason = reject_reason(group, least)
        if reason is DropReason.FAILED:
            if fails_by_task(group, self._plan.group_size, least) and self._queue.count_failure(group.task):
                failed = f"its last {self._plan.failures.task_limit} groups had fewer than {least} graded attempts"
                self._reporter.callbacks.message(f"task {group.task.task_id} is left out: {failed}")
            self._reporter.failures([group])
            return reason
        self._queue.failed_tasks.pop(group.task.task_id, None)  # enough attempts are graded
        filtering = reason is None and self._plan.algorithm.dynamic_sampling == "filter"
        return DropReason.FILTERED if filtering and has_zero_advantage(group, self._plan.algorithm) else reason

    def _drop(self, group: Group, reason: DropReason) -> None:
        """recorded or ready -> dropped."""
        del self._tracked[group.index]
        self._dropped.append(group)
        self._window.discarded[reason] += 1
        self.store.ledger.note_dropped(leave_out(group, reason))
