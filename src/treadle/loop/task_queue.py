"""The order of groups: `TaskOrder`, an endless sequence of tasks, and `TaskQueue`, a run's position in it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from treadle.core.draws import permutation
from treadle.core.errors import DataError
from treadle.core.types import Group, Task, group_id
from treadle.data.tasks import Mixture

Draw = Callable[[int, Sequence[Task], int, int], int | None]
"""Index of a group, tasks, first and end of its source -> position of its task, or None."""


class TaskOrder:
    """Orders the training tasks, endlessly: a pure function of tasks, seed and index, and of a curriculum's weights.

    Each source of a `Mixture` gets its share of the groups, as evenly as possible: of the first n groups, its share of
    n to within about one. It goes through its own tasks epoch by epoch. Tasks outside a mixture form one source.
    draw: position of a group's task among those of its source (`loop.starts.Starts.draw`); None: epoch by epoch.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, shuffle: bool, draw: Draw = lambda *_: None) -> None:
        if not tasks:
            raise DataError("there are no training tasks")
        parts, weights = (tasks.parts, tasks.weights) if isinstance(tasks, Mixture) else ([tasks], [1.0])
        self.tasks, self._weights, self._draw = tasks, weights, draw
        self._turns: list[tuple[int, int]] = []  # source of each group so far, and the number of earlier groups from it
        self._counts = [0] * len(weights)
        self._starts = [0, *accumulate(map(len, parts))]
        self._orders = [_SourceOrder(len(part), seed, shuffle, number) for number, part in enumerate(parts)]
        self.longest_wait = max(
            math.ceil(len(part) * sum(weights) / weight) + len(parts) - 1
            for part, weight in zip(parts, weights, strict=True)
        )
        """Number of consecutive groups that include every task at least once."""

    def at(self, index: int) -> tuple[int, int, Task]:
        """Return (epoch of its source, position in the dataset, task) of the group with this submission index.

        With a curriculum, tasks of its source are drawn, and the index takes the place of the epoch.
        """
        source, number = self._turn(index)
        first, end = self._starts[source : source + 2]
        if (drawn := self._draw(index, self.tasks, first, end)) is not None:
            return index, drawn, self.tasks[drawn]
        epoch, place = self._orders[source].at(number)
        position = first + place
        return epoch, position, self.tasks[position]

    def _turn(self, index: int) -> tuple[int, int]:
        """Return the source furthest behind its share, the first of several, and its earlier groups' number."""
        if len(self._weights) == 1:
            return 0, index
        while len(self._turns) <= index:
            source = min(range(len(self._weights)), key=lambda n: (self._counts[n] + 0.5) / self._weights[n])
            self._turns.append((source, self._counts[source]))
            self._counts[source] += 1
        return self._turns[index]


class _SourceOrder:
    """Orders the tasks of one source: each epoch has its own shuffle, a pure function of seed, source and epoch.

    No epoch repeats the order of the previous one: should that happen by chance, it is rotated by one.
    """

    def __init__(self, size: int, seed: int, shuffle: bool, source: int) -> None:
        self._size, self._seed, self._shuffle, self._source = size, seed, shuffle, source
        self._epoch, self._order = -1, np.arange(0)

    def at(self, number: int) -> tuple[int, int]:
        """Return (epoch, position in the source) of its group with this number."""
        epoch, place = divmod(number, self._size)
        if not self._shuffle:
            return epoch, place
        if epoch < self._epoch:
            self._epoch, self._order = -1, np.arange(0)
        while self._epoch < epoch:
            self._epoch += 1
            order = permutation(self._size, self._seed, self._epoch, source=self._source)
            self._order = np.roll(order, 1) if np.array_equal(order, self._order) else order
        return epoch, int(self._order[place])


@dataclass(frozen=True, slots=True)
class Backlog:
    """Position of a run when it was left; the default is a new run.

    next_index: first group that was never started. requeued: indices of earlier ones that were not trained, and are
    sampled again. restored: index -> group with some recorded attempts; only the others are played. times_sampled:
    index -> number of recorded groups with it, so that the next one gets a new name.
    failed_tasks: task_id -> consecutive groups with too few graded attempts.
    """

    next_index: int = 0
    requeued: Sequence[int] = ()
    restored: Mapping[int, Group] = field(default_factory=dict)
    times_sampled: Mapping[int, int] = field(default_factory=dict)
    failed_tasks: Mapping[str, int] = field(default_factory=dict)


class TaskQueue:
    """Hands out groups to play: first the backlog's requeued ones, then the order of tasks.

    task_limit: consecutive failed groups after which a task is skipped. next_index, requeued, failed_tasks: current
    values of the fields of `Backlog`.
    """

    def __init__(self, order: TaskOrder, task_limit: int, backlog: Backlog | None = None) -> None:
        backlog = backlog or Backlog()
        self._order, self._task_limit = order, task_limit
        self.next_index, self.requeued = backlog.next_index, deque(backlog.requeued)
        self.failed_tasks = dict(backlog.failed_tasks)
        self._restored, self._times_sampled = dict(backlog.restored), backlog.times_sampled

    def pop(self) -> Group | None:
        """Return the next group, with its recorded attempts; None if all tasks are left out.

        A recorded group is handed out even if its task is left out; otherwise its steps would count as trained.
        """
        if self.requeued:
            return self._group(self.requeued.popleft())
        for _ in range(self._order.longest_wait):
            on_record = self.next_index in self._restored
            group = self._group(self.next_index)
            self.next_index += 1
            if on_record or self.failed_tasks.get(group.task.task_id, 0) < self._task_limit:
                return group
        return None

    def count_failure(self, task: Task) -> bool:
        """Count another failed group of the task; return whether it is left out from now on."""
        self.failed_tasks[task.task_id] = count = self.failed_tasks.get(task.task_id, 0) + 1
        return count == self._task_limit

    def _group(self, index: int) -> Group:
        if index in self._restored:
            return self._restored.pop(index)
        epoch, position, task = self._order.at(index)
        times = self._times_sampled.get(index, 0)
        name = group_id(index) + (f"r{times}" if times else "")
        return Group(name, index, epoch, position, task, ())
