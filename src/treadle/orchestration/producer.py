"""From tasks to finished groups: `TaskCursor` -> `Producer` -> `GroupBuffer`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from treadle.core.draws import Stream, permutation
from treadle.core.errors import DataError
from treadle.core.types import Group, Task, group_id
from treadle.rollout.attempt import Rollouts, gather_group
from treadle.rollout.session import Address


class TaskCursor:
    """Tasks in the order of training, for ever: each epoch has its own shuffle, a pure function of seed and epoch."""

    def __init__(self, tasks: Sequence[Task], seed: int, shuffle: bool) -> None:
        if not tasks:
            raise DataError("there are no training tasks")
        self._tasks, self._seed, self._shuffle = tasks, seed, shuffle
        self._epoch, self._order = -1, range(0)

    def at(self, index: int) -> tuple[int, int, Task]:
        """(epoch, position in the dataset, task) of the group with this submission index."""
        epoch, place = divmod(index, len(self._tasks))
        if self._shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(len(self._tasks), self._seed, epoch).tolist()
        position = self._order[place] if self._shuffle else place
        return epoch, position, self._tasks[position]


class GroupBuffer:
    """Finished groups, taken in submission order, whatever order they finish in.

    `persist` makes a batch durable before it is handed out: tokens first, then the ledger.
    """

    def __init__(self, next_index: int, persist: Callable[[list[Group]], None]) -> None:
        self._next, self._persist = next_index, persist
        self._finished: dict[int, Group] = {}
        self._arrived = asyncio.Event()

    def put(self, group: Group) -> None:
        """Add a finished group."""
        self._finished[group.index] = group
        self._arrived.set()

    async def take(self, size: int) -> list[Group]:
        """The next `size` groups, once all of them have finished and are durable."""
        wanted = range(self._next, self._next + size)
        while any(index not in self._finished for index in wanted):
            self._arrived.clear()
            await self._arrived.wait()
        self._next += size
        batch = [self._finished.pop(index) for index in wanted]
        self._persist(batch)
        return batch


class Producer:
    """Starts groups as far as admission allows; each finished one goes to the buffer.

    A group may start while   started < (version + 1 + max_staleness) * groups_per_batch.
    With max_staleness 0 that is exactly the next batch, all sampled by the version that will be trained: synchronous
    training is a value here, not a code path.
    """

    def __init__(
        self,
        cursor: TaskCursor,
        rollouts: Rollouts,
        buffer: GroupBuffer,
        tasks: asyncio.TaskGroup,
        *,
        seed: int,
        group_size: int,
        groups_per_batch: int,
        max_staleness: int,
        started: int,
        times_sampled: Mapping[int, int],
        on_trajectory: Callable[[], None],
    ) -> None:
        self._cursor, self._rollouts, self._buffer, self._tasks = cursor, rollouts, buffer, tasks
        self._seed, self._group_size = seed, group_size
        self._groups_per_batch, self._max_staleness = groups_per_batch, max_staleness
        self._started, self._times_sampled, self._on_trajectory = started, times_sampled, on_trajectory

    def admit(self, version: int) -> None:
        """Start what this policy version admits."""
        while self._started < (version + 1 + self._max_staleness) * self._groups_per_batch:
            self._start(self._started)
            self._started += 1

    def _start(self, index: int) -> None:
        epoch, position, task = self._cursor.at(index)
        addresses = [Address(self._seed, Stream.TRAIN, epoch, position, a) for a in range(self._group_size)]
        again = self._times_sampled.get(index, 0)
        name = group_id(index) + (f"r{again}" if again else "")
        attempts = self._rollouts.start(name, task, addresses)
        for attempt in attempts:
            attempt.add_done_callback(lambda _: self._on_trajectory())
        self._tasks.create_task(self._finish(partial(gather_group, name, index, epoch, position, task, attempts)))

    async def _finish(self, group: Callable[[], Awaitable[Group]]) -> None:
        self._buffer.put(await group())
