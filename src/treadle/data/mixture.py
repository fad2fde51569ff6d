"""Parts of sequences of tasks, and several in one."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from treadle.core.errors import ConfigError
from treadle.core.types import Task
from treadle.data.tasks import LazyTasks, Player, players, task_ids, tasks_sha256

SOURCE = "source"
"""The extra that names the source of a task of a mixture."""

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
        """Return what plays the tasks, also those outside of the range."""
        return self._tasks.players()

    def sha256(self) -> str:
        return hashlib.sha256(f"{self._tasks.sha256()} {self._numbers}".encode()).hexdigest()


class Mixture(LazyTasks):
    """The tasks of several sources, one source after the other, and how often each is visited in training.

    Its tasks are those of the sources with the source's name before their ids (`gsm8k/train-000017`) and as their extra
    `source`, unless they have one. weights: shares of the groups (`orchestration.sampling.task_queue.TaskOrder`).
    """

    def __init__(self, names: Sequence[str], parts: Sequence[Sequence[Task]], weights: Sequence[float]) -> None:
        self.names, self.parts, self.weights = names, parts, weights
        self.starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.starts[-1]

    def _at(self, number: int) -> Task:
        part = bisect_right(self.starts, number) - 1
        name, task = self.names[part], self.parts[part][number - self.starts[part]]
        return replace(task, task_id=_within(name, task.task_id), extras={SOURCE: name, **task.extras})

    def task_ids(self) -> Iterator[str]:
        for name, part in zip(self.names, self.parts, strict=True):
            yield from (_within(name, task_id) for task_id in task_ids(part))

    def players(self) -> set[Player]:
        return set().union(*map(players, self.parts))

    def sha256(self) -> str:
        return hashlib.sha256(" ".join([*self.names, *map(tasks_sha256, self.parts)]).encode()).hexdigest()


def _within(name: str, task_id: str) -> str:
    return f"{name}/{task_id}"


def parse_split(split: str | None, setting: str) -> tuple[str, str | None, str | None]:
    """Return name, start and end: `test[10%:500]` is ("test", "10%", "500"), and None is ("", None, None).

    Raises ConfigError.
    """
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
