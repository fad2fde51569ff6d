"""From tasks to finished groups: `TaskCursor` -> `Producer` -> `GroupBuffer`."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from treadle.core.draws import Stream, permutation
from treadle.core.errors import DataError
from treadle.core.outcomes import as_played
from treadle.core.types import Group, Task, Trajectory, group_id
from treadle.orchestration.buffer import GroupBuffer
from treadle.orchestration.failures import Retries
from treadle.packing.flat import Indices
from treadle.rollout.attempt import RolloutRunner
from treadle.rollout.session import Address


class TaskCursor:
    """Tasks in the order of training, for ever: each epoch has its own shuffle, a pure function of seed and epoch.

    No epoch has the order of the one before it: where chance would have it so, it is turned by one.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, shuffle: bool) -> None:
        if not tasks:
            raise DataError("there are no training tasks")
        self.tasks, self._seed, self._shuffle = tasks, seed, shuffle
        self._epoch, self._order = -1, np.arange(0)

    def at(self, index: int) -> tuple[int, int, Task]:
        """(epoch, position in the dataset, task) of the group with this submission index."""
        epoch, place = divmod(index, len(self.tasks))
        position = int(self._shuffled(epoch)[place]) if self._shuffle else place
        return epoch, position, self.tasks[position]

    def _shuffled(self, epoch: int) -> Indices:
        if epoch < self._epoch:
            self._epoch, self._order = -1, np.arange(0)
        while self._epoch < epoch:
            self._epoch += 1
            order = permutation(len(self.tasks), self._seed, self._epoch)
            self._order = np.roll(order, 1) if np.array_equal(order, self._order) else order
        return self._order


class Producer:
    """Keeps `capacity` groups under way: being sampled, or finished and waiting to be trained.

    capacity is (1 + max_staleness) * groups_per_batch: at max_staleness 0 exactly the next batch, all of it sampled by
    the version that will be trained. Synchronous training is a value here, not a code path.
    in_rounds: groups start only when none is running, so that what an engine in lock-step samples together never
    depends on timing. most: groups that run at a time. most_attempts: another group starts only while fewer than that
    are being played.
    record: makes a finished trajectory durable, before its group is offered to the buffer. on_trajectory: told of it
    then, and whether another attempt takes its place.
    cursor.at(next_index) is the next task, after groups that were started before and are sampled `again`.
    kept: those of which some attempts are on record; only the others are made. times_sampled: index -> how often such
    a group is on record already. left_out: tasks that are not played any more.
    """

    def __init__(
        self,
        cursor: TaskCursor,
        rollouts: RolloutRunner,
        buffer: GroupBuffer,
        tasks: asyncio.TaskGroup,
        *,
        seed: int,
        group_size: int,
        capacity: int,
        in_rounds: bool,
        most: int | None,
        most_attempts: Callable[[], float],
        next_index: int,
        again: Sequence[int],
        kept: Mapping[int, Group],
        times_sampled: Mapping[int, int],
        retries: Retries,
        record: Callable[[Group], Awaitable[None]],
        left_out: Callable[[Task], bool],
        on_trajectory: Callable[[Trajectory, bool], None],
    ) -> None:
        self._cursor, self._rollouts, self._buffer, self._tasks = cursor, rollouts, buffer, tasks
        self._seed, self._group_size, self._capacity = seed, group_size, capacity
        self._in_rounds, self._most, self._most_attempts = in_rounds, most, most_attempts
        self._playing = 0
        self._times_sampled = times_sampled
        self._retries, self._record, self._left_out = retries, record, left_out
        self._on_trajectory = on_trajectory
        self._version = 0
        self.next_index, self.again = next_index, deque(again)
        self._kept = dict(kept)
        self._finishing: set[asyncio.Task[None]] = set()

    def admit(self, version: int) -> None:
        """Start what this policy version admits."""
        self._version = version
        if self._in_rounds and self._buffer.running:
            return
        while self._has_room():
            group = self._next()
            if group is None:
                return
            self._start(group)

    def _has_room(self) -> bool:
        few = self._most is None or self._buffer.running < self._most
        return few and self._buffer.under_way < self._capacity and self._playing < self._most_attempts()

    def stop(self) -> None:
        """Cancel whatever is being sampled."""
        for task in self._finishing:
            task.cancel()

    def _next(self) -> Group | None:
        """The next group, none of a task that is left out unless it is on record; None if there is none."""
        if self.again:
            return self._group(self.again.popleft())
        for _ in range(len(self._cursor.tasks)):
            on_record = self.next_index in self._kept
            group = self._group(self.next_index)
            self.next_index += 1
            if on_record or not self._left_out(group.task):
                return group
        return None

    def _group(self, index: int) -> Group:
        if index in self._kept:
            return self._kept.pop(index)
        epoch, position, task = self._cursor.at(index)
        again = self._times_sampled.get(index, 0)
        name = group_id(index) + (f"r{again}" if again else "")
        return Group(name, index, epoch, position, task, ())

    def _start(self, group: Group) -> None:
        """Open the sessions of all missing attempts now and in order."""
        versions = (as_played(t).oldest_version for t in group.trajectories)
        self._buffer.expect(group.index, min([self._version, *(v for v in versions if v is not None)]))
        addresses = [
            Address(self._seed, Stream.TRAIN, group.epoch, group.position, attempt) for attempt in self._missing(group)
        ]
        running = self._play(group, addresses)
        task = self._tasks.create_task(self._finish(group, list(zip(addresses, running, strict=True))))
        self._finishing.add(task)
        task.add_done_callback(partial(self._ended, running))

    def _missing(self, group: Group) -> list[int]:
        """The next attempt of each place in the group: the first, or after one on record that is made again."""
        missing = []
        for place in range(self._group_size):
            made = [t for t in group.trajectories if t.attempt % self._group_size == place]
            if not made:
                missing.append(place)
            elif self._retries.seconds_before(made[-1], len(made)) is not None:
                missing.append(made[-1].attempt + self._group_size)
        return missing

    def _play(self, group: Group, addresses: list[Address]) -> list[asyncio.Future[Trajectory]]:
        attempts = self._rollouts.start(group.group_id, group.task, addresses)
        self._playing += len(attempts)
        for attempt in attempts:
            attempt.add_done_callback(self._played)
        return attempts

    def _played(self, _: asyncio.Future[Trajectory]) -> None:
        self._playing -= 1

    def _ended(self, attempts: Sequence[asyncio.Future[Trajectory]], task: asyncio.Task[None]) -> None:
        self._finishing.discard(task)
        for attempt in attempts:
            attempt.cancel()  # of no effect but where the task was cancelled before it waited for them

    async def _finish(self, group: Group, attempts: list[tuple[Address, asyncio.Future[Trajectory]]]) -> None:
        playing = [asyncio.ensure_future(self._attempt(group, *attempt)) for attempt in attempts]
        try:
            played = await asyncio.gather(*playing)
        except Exception:
            for task in playing:
                task.cancel()
            await asyncio.wait(playing)  # nothing is sampled any more when the run ends
            raise
        trajectories = sorted([*group.trajectories, *itertools.chain(*played)], key=lambda t: t.attempt)
        self._buffer.put(replace(group, trajectories=tuple(trajectories)))
        self.admit(self._version)

    async def _attempt(self, group: Group, address: Address, running: asyncio.Future[Trajectory]) -> list[Trajectory]:
        """Play one attempt, and others in its place as far as the policy of its failure goes; all of them."""
        played: list[Trajectory] = []
        while True:
            trajectory = await running
            pause = self._retries.seconds_before(trajectory, address.attempt // self._group_size + 1)
            if pause is None:
                trajectory = self._retries.final(trajectory)
            played.append(trajectory)
            await self._record(replace(group, trajectories=(trajectory,)))
            self._on_trajectory(trajectory, pause is not None)
            if pause is None:
                self.admit(self._version)
                return played
            await asyncio.sleep(pause)
            address = replace(address, attempt=address.attempt + self._group_size)
            [running] = self._play(group, [address])
