"""Which groups are under way, which have finished, and which of those make the next batch.

expect -> running -put-> ready -batch-> training -trained-> gone
                    |             |
                    +-- discard --+      (failed, filtered, stale: another group takes its place)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from treadle.core.outcomes import trains, without_stale
from treadle.core.types import DropReason, Group

Late = Literal["mask_steps", "wait", "drop"]


class GroupBuffer:
    """Finished groups, oldest first.

    judge: why a finished group is of no use, or None. discard: told of groups that are not trained, with the reason.
    late: what becomes of steps whose oldest token is more than `max_staleness` versions old when they would be trained:
    `mask_steps` leaves those out, `drop` the whole group, `wait` waits for groups before that can happen.

    Invariant: a group is in exactly one of running, ready and training; none that leaves has a live step that is stale.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        late: Late,
        judge: Callable[[Group], DropReason | None],
        discard: Callable[[Group, DropReason], None],
    ) -> None:
        self._max_staleness, self._late, self._judge, self._discard = max_staleness, late, judge, discard
        self._running: dict[int, int] = {}  # index -> version that it was started at
        self._ready: dict[int, tuple[int, Group]] = {}  # index -> (that version, the group)
        self._training = 0
        self._arrived = asyncio.Event()

    @property
    def running(self) -> int:
        """Groups being sampled."""
        return len(self._running)

    @property
    def under_way(self) -> int:
        """Groups that were started and are not trained yet."""
        return len(self._running) + len(self._ready) + self._training

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Indices of groups that were started and not taken."""
        return tuple(sorted({*self._running, *self._ready}))

    def expect(self, index: int, version: int) -> None:
        """A group is started by this version."""
        self._running[index] = version

    def put(self, group: Group) -> None:
        """It has finished."""
        version = self._running.pop(group.index)
        reason = self._judge(group)
        if reason is None:
            self._ready[group.index] = (version, group)
        else:
            self._discard(group, reason)
        self._arrived.set()

    async def arrival(self) -> None:
        """Wait for a group that has finished since `batch` was asked last."""
        await self._arrived.wait()

    def batch(self, size: int, version: int) -> list[Group] | None:
        """The `size` groups that were started first, in order of submission; None while there are too few.

        version: that will be trained. Steps that are stale by then are marked as dropped.
        """
        self._arrived.clear()
        oldest = version - self._max_staleness
        for index, (started, group) in list(self._ready.items()):
            fresh = without_stale(group, oldest)
            if fresh is not group and (self._late == "drop" or not trains(fresh)):
                del self._ready[index]
                self._discard(group, DropReason.STALE)
            else:
                self._ready[index] = (started, fresh)
        first = sorted(self._ready, key=lambda index: (self._ready[index][0], index))[:size]
        if len(first) < size or (self._late == "wait" and self._too_early(self._ready[first[-1]][0], size, version)):
            return None
        self._training = size
        return [self._ready.pop(index)[1] for index in sorted(first)]

    def _too_early(self, newest: int, size: int, version: int) -> bool:
        """Whether of the running groups some would be stale if a batch with one started at `newest` went first.

        Those that were started later, or wait already, can be no better off; of those that were started at version s,
        `size` at a time can be trained up to version s + max_staleness.
        """
        older = sorted(started for started in self._running.values() if started < newest)
        return any(n >= (started + self._max_staleness - version) * size for n, started in enumerate(older))

    def trained(self) -> None:
        """What was taken last is trained, and its weights are published."""
        self._training = 0
