"""Sequences of tasks that need not be in memory, and functions of any sequence of tasks."""

from __future__ import annotations

import hashlib
import json
import re
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Generic, TypeVar, overload

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task

Player = tuple[str, str]
"""Player of a task: kind and name, as `Task.player`."""


class LazyTasks(Sequence[Task]):
    """Tasks made on demand, checked beforehand. All of them name their player."""

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._at(number) for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._at(index % len(self))

    @abstractmethod
    def _at(self, number: int) -> Task: ...

    @abstractmethod
    def task_ids(self) -> Iterator[str]:
        """Yield the ids in order, without making the tasks."""

    @abstractmethod
    def players(self) -> set[Player]:
        """Return the tasks' players."""

    @abstractmethod
    def sha256(self) -> str:
        """Return a digest of the tasks' data; equal digests mean equal tasks."""


T = TypeVar("T")


def tasks_of(rows: Iterable[T], make: Callable[[T], Task]) -> Sequence[Task]:
    """Return the tasks of rows. Those with images are made anew on demand, so that memory does not hold all images."""
    tasks = _RowTasks(make)
    for row in rows:
        tasks.add(row)
    return tasks if tasks.has_images else tasks.made


class _RowTasks(LazyTasks, Generic[T]):
    """made: the tasks without images, and the rows of the others."""

    def __init__(self, make: Callable[[T], Task]) -> None:
        self.made: list[Any] = []
        self.has_images = False
        self._make, self._ids, self._players = make, list[str](), set[Player]()

    def add(self, row: T) -> None:
        task = self._make(row)
        seen = any(message.get("images") for message in task.prompt)
        self.has_images |= seen
        self.made.append((row,) if seen else task)
        self._ids.append(task.task_id)
        self._players.add(task.player)

    def __len__(self) -> int:
        return len(self.made)

    def _at(self, number: int) -> Task:
        made = self.made[number]
        return made if isinstance(made, Task) else self._make(*made)

    def task_ids(self) -> Iterator[str]:
        return iter(self._ids)

    def players(self) -> set[Player]:
        return self._players

    def sha256(self) -> str:
        return _sha256(self)


def task_ids(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield the tasks' ids in order."""
    return tasks.task_ids() if isinstance(tasks, LazyTasks) else (task.task_id for task in tasks)


def players(tasks: Sequence[Task]) -> set[Player]:
    """Return the tasks' players."""
    return tasks.players() if isinstance(tasks, LazyTasks) else {task.player for task in tasks}


def tasks_sha256(tasks: Sequence[Task]) -> str:
    """Return a digest of the tasks, in order."""
    return tasks.sha256() if isinstance(tasks, LazyTasks) else _sha256(tasks)


def _sha256(tasks: Sequence[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        parts = [task.task_id, task.prompt, task.player, task.ground_truth, dict(task.extras)]
        digest.update(json.dumps(parts).encode() + b"\n")
    return digest.hexdigest()


def check_disjoint(train: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Raise DataError if an id is in both; keeps only the ids of the shorter sequence in memory."""
    shorter, longer = sorted((train, held_out), key=len)
    held = set(task_ids(shorter))
    shared = {task_id for task_id in task_ids(longer) if task_id in held} if held else set()
    if shared:
        raise DataError(
            f"{len(shared)} held-out tasks are training tasks too, for example {min(shared)!r}; keep them apart "
            "(if only ids are the same, because files are called alike, rename one)"
        )


def check_no_copies(train: Iterable[Task], held_out: Iterable[Task]) -> None:
    """Raise DataError if a task of one has the same content as a task of the other, whatever their ids."""

    def content(task: Task) -> bytes:
        parts = [task.prompt, task.player, task.ground_truth, dict(task.extras)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()

    places = {content(task): task.task_id for task in train}
    copies = [(task.task_id, places[key]) for task in held_out if (key := content(task)) in places]
    if copies:
        held, trained = copies[0]
        raise DataError(
            f"{len(copies)} held-out tasks are training tasks too, for example {held!r} is {trained!r}; keep them apart"
        )


def with_player(task: Task, player: Player) -> Task:
    """Return the task with this player, unless it names its own."""
    named: dict[str, Any] = dict([player])
    return task if task.player[1] else replace(task, **named)


def with_players(tasks: Sequence[Task], player: Player) -> Sequence[Task]:
    """Return the tasks, each with a player. Lazy tasks already have one."""
    return tasks if isinstance(tasks, LazyTasks) else [with_player(task, player) for task in tasks]


def check_distinct(source: str, ids: Iterable[str]) -> None:
    """Raise DataError if two tasks of a source have the same id."""
    places: dict[str, int] = {}
    for number, task_id in enumerate(ids):
        first = places.setdefault(task_id, number)
        if first != number:
            raise DataError(
                f"{source}: task_id {task_id!r} belongs to both task {first} and task {number} "
                "(counted from 0); give each its own"
            )


_SPLIT = re.compile(r"(?P<name>[\w.-]*)(?:\[(?P<start>-?\d+%?)?:(?P<end>-?\d+%?)?\])?")


class TaskRange(LazyTasks):
    """A range of other lazy tasks."""

    def __init__(self, tasks: LazyTasks, numbers: range) -> None:
        self._tasks, self._numbers = tasks, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def _at(self, number: int) -> Task:
        return self._tasks[self._numbers[number]]

    def task_ids(self) -> Iterator[str]:
        return (each for number, each in enumerate(self._tasks.task_ids()) if number in self._numbers)

    def players(self) -> set[Player]:
        # Includes players outside the range.
        return self._tasks.players()

    def sha256(self) -> str:
        return hashlib.sha256(f"{self._tasks.sha256()} {self._numbers}".encode()).hexdigest()


class Mixture(LazyTasks):
    """The tasks of several sources, one source after the other, with each one's share of visits in training.

    The source's name precedes the tasks' ids (`gsm8k/train-000017`) and becomes their extra `source`, unless they have
    one. weights: shares of the groups (`loop.task_queue.TaskOrder`).
    """

    def __init__(self, names: Sequence[str], parts: Sequence[Sequence[Task]], weights: Sequence[float]) -> None:
        self.names, self.parts, self.weights = names, parts, weights
        self.starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.starts[-1]

    def _at(self, number: int) -> Task:
        part = bisect_right(self.starts, number) - 1
        name, task = self.names[part], self.parts[part][number - self.starts[part]]
        return replace(task, task_id=f"{name}/{task.task_id}", extras={"source": name, **task.extras})

    def task_ids(self) -> Iterator[str]:
        for name, part in zip(self.names, self.parts, strict=True):
            yield from (f"{name}/{task_id}" for task_id in task_ids(part))

    def players(self) -> set[Player]:
        return set().union(*map(players, self.parts))

    def sha256(self) -> str:
        return hashlib.sha256(" ".join([*self.names, *map(tasks_sha256, self.parts)]).encode()).hexdigest()


def parse_split(split: str | None, setting: str) -> tuple[str, str | None, str | None]:
    """Return name, start and end: `test[10%:500]` is ("test", "10%", "500"), and None is ("", None, None)."""
    match = _SPLIT.fullmatch(split or "")
    if not match:
        raise ConfigError(f"{setting}.split: {split!r} must look like train, test[:500] or all[90%:]")
    return match["name"], match["start"], match["end"]


def take_range(tasks: Sequence[Task], start: str | None, end: str | None) -> Sequence[Task]:
    """Return the tasks from `start` to `end`, numbers or percentages of them; negative ones count from the end."""
    if start is None and end is None:
        return tasks
    numbers = range(len(tasks))[slice(_number(start, len(tasks)), _number(end, len(tasks)))]
    return TaskRange(tasks, numbers) if isinstance(tasks, LazyTasks) else tasks[numbers.start : numbers.stop]


def _number(text: str | None, size: int) -> int | None:
    if text is None:
        return None
    return int(text[:-1]) * size // 100 if text.endswith("%") else int(text)
