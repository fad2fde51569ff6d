"""Sequences of tasks that need not be in memory, and functions of any sequence of tasks."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

from treadle.core.errors import DataError
from treadle.core.types import Task

Player = tuple[str, str]
"""What plays a task: kind and name, as `Task.player`."""


class LazyTasks(Sequence[Task]):
    """Tasks that are made when they are asked for, checked beforehand. All of them name what plays them."""

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
        """Return what plays them."""

    @abstractmethod
    def sha256(self) -> str:
        """Return a digest of what the tasks are made of; equal digests, equal tasks."""


def task_ids(tasks: Sequence[Task]) -> Iterator[str]:
    """Yield the tasks' ids in order."""
    return tasks.task_ids() if isinstance(tasks, LazyTasks) else (task.task_id for task in tasks)


def players(tasks: Sequence[Task]) -> set[Player]:
    """Return what plays the tasks."""
    return tasks.players() if isinstance(tasks, LazyTasks) else {task.player for task in tasks}


def tasks_sha256(tasks: Sequence[Task]) -> str:
    """Return a digest of the tasks, in order."""
    if isinstance(tasks, LazyTasks):
        return tasks.sha256()
    digest = hashlib.sha256()
    for task in tasks:
        parts = [task.task_id, task.prompt, task.player, task.ground_truth, dict(task.extras)]
        digest.update(json.dumps(parts).encode() + b"\n")
    return digest.hexdigest()


def check_disjoint(train: Sequence[Task], held_out: Sequence[Task]) -> None:
    """Raise DataError if an id is in both; only the ids of the shorter sequence are held in memory."""
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
    places = {_content(task): task.task_id for task in train}
    copies = [(task.task_id, places[content]) for task in held_out if (content := _content(task)) in places]
    if copies:
        held, trained = copies[0]
        raise DataError(
            f"{len(copies)} held-out tasks are training tasks too, for example {held!r} is {trained!r}; keep them apart"
        )


def _content(task: Task) -> bytes:
    parts = [task.prompt, task.player, task.ground_truth, dict(task.extras)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def with_player(task: Task, player: Player) -> Task:
    """Return the task, played by this environment, agent or driver if it names nothing itself."""
    named: dict[str, Any] = dict([player])
    return task if task.player[1] else replace(task, **named)


def with_players(tasks: Sequence[Task], player: Player) -> Sequence[Task]:
    """Return the tasks, each with something that plays it. Lazy ones have that already."""
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
