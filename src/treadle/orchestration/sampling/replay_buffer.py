"""Which groups are under way, which have finished, and which of those make the next batch.

start -> running -finish-> ready -take-> training -trained-> gone
                    |        |
                    +- drop -+      (failed, filtered, stale: another group takes its place)
"""

from __future__ import annotations

import asyncio
from typing import Literal

from treadle.core.outcomes import trains, without_stale
from treadle.core.types import Group

StalePolicy = Literal["mask_steps", "wait", "drop_group"]


class ReplayBuffer:
    """Keeps finished groups until they are trained, oldest first; they are on record before they come here.

    stale_policy: what becomes of steps whose oldest token is more than `max_staleness` versions old when they would be
    trained: `mask_steps` leaves those out, `drop_group` their group too, `wait` waits for groups before it can happen.

    Invariant: a group is in exactly one of running, ready and training; none that leaves has a live step that is stale.
    """

    def __init__(self, max_staleness: int = 0, stale_policy: StalePolicy = "mask_steps") -> None:
        self._max_staleness, self._stale_policy = max_staleness, stale_policy
        self._running: dict[int, int] = {}  # index -> version that it was started at
        self._ready: dict[int, tuple[int, Group]] = {}  # index -> (that version, the group)
        self._training = 0
        self._arrived = asyncio.Event()

    @property
    def running(self) -> int:
        """Return the number of groups that are being sampled."""
        return len(self._running)

    @property
    def ready(self) -> int:
        """Return the number of groups that have finished and wait to be trained."""
        return len(self._ready)

    @property
    def under_way(self) -> int:
        """Return the number of groups that were started and are not trained yet."""
        return len(self._running) + len(self._ready) + self._training

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Return the indices of the groups that were started and not taken."""
        return tuple(sorted({*self._running, *self._ready}))

    def start(self, index: int, version: int) -> None:
        """Note that a group is started by this version."""
        self._running[index] = version

    def finish(self, group: Group) -> None:
        """Take a group that can be trained."""
        self._ready[group.index] = (self._running.pop(group.index), group)
        self._arrived.set()

    def drop(self, group: Group) -> None:
        """Forget a running group that cannot be trained."""
        del self._running[group.index]
        self._arrived.set()

    async def arrival(self) -> None:
        """Wait until a group has finished, or was dropped, since `take` was called last."""
        await self._arrived.wait()

    def drop_stale(self, version: int) -> list[Group]:
        """Mark the steps that are stale for training at this version; return the groups that are dropped for them.

        It is called for each batch that is looked for, so that a group which waits may have been marked before.
        """
        oldest, dropped = version - self._max_staleness, []
        for index, (started, group) in list(self._ready.items()):
            if started >= oldest:  # so are all of its tokens
                continue
            fresh = without_stale(group, oldest)
            if fresh is not group and (self._stale_policy == "drop_group" or not trains(fresh)):
                del self._ready[index]
                dropped.append(group)
            else:
                self._ready[index] = (started, fresh)
        return dropped

    def take(self, size: int, version: int) -> list[Group] | None:
        """Return the `size` groups that were started first, in order of submission; None while there are too few.

        version: that will be trained; `drop_stale` has been called for it.
        """
        self._arrived.clear()
        first = sorted(self._ready, key=lambda index: (self._ready[index][0], index))[:size]
        if len(first) < size:
            return None
        if self._stale_policy == "wait" and self._too_early(self._ready[first[-1]][0], size, version):
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
        """Note that what was taken last is trained, and its weights are published."""
        self._training = 0
