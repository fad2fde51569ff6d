"""`load_tasks`: the tasks that `data.train` or `data.held_out` names, checked, whatever they are stored in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.data.config import Columns, SourceConfig
from treadle.data.mixture import Mixture, parse_split, take_range
from treadle.data.rows import PROMPT, Row, make_task
from treadle.data.sources import ArrowSource, open_source, short_name
from treadle.data.tasks import Player, check_distinct, with_player
from treadle.envs.base import Environment
from treadle.envs.tasks import load_environment, made_class


@dataclass(frozen=True)
class LoadContext:
    """Holds what all sources of a run have in common.

    columns: of sources without their own. player: what plays the tasks that name nothing, and its name (`Task.player`).
    environments: by name, classes or other makers that the registry need not know. seed: for generators that take one.
    """

    columns: Columns | None = None
    player: Player = ("environment", "")
    environments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def columns_of(self, section: SourceConfig) -> Columns | None:
        """Return where a source's rows have the parts of a task."""
        return self.columns if section.columns is None else section.columns

    def task(self, row: Row, section: SourceConfig) -> Task:
        """Return the task in a row, with what plays it. Raises DataError, which names the row."""
        task = row.value if isinstance(row.value, Task) else make_task(row, self.columns_of(section))
        task = with_player(task, self.player)
        if not task.prompt and not isinstance(row.value, Task):
            self._require_maker(task.player, row.where)
        return task

    def _require_maker(self, player: Player, where: str) -> None:
        """Raise DataError for a row without a prompt, unless an agent, a driver or the environment makes one."""
        kind, name = player
        if kind != "environment":
            return
        maker = made_class(self.environments.get(name) or (load_environment(name) if name else Environment))
        if getattr(maker, "reset", None) is Environment.reset:
            owner = f"environment {name!r} does not make its own" if name else "no environment"
            raise DataError(f'{where}: no prompt, and {owner}; write "prompt": {PROMPT}, or set data.columns.prompt')


Section = SourceConfig | tuple[SourceConfig, ...]
"""`data.train` or `data.held_out`."""


def load_tasks(section: Section, split: str, context: LoadContext) -> Sequence[Task]:
    """Return all tasks of a section, in order: at least one, and no `task_id` twice. Rows are checked.

    split: `train` or `held_out`, the section's key in `data`.

    Raises ConfigError: no such file, data set or generator, or options it does not take. DataError: a row, or what a
    generator returned, breaks the contract; the message names file and row.
    """
    if isinstance(section, SourceConfig):
        return _load_source(section, split, f"data.{split}", context)
    names = [part.name or short_name(part.source) for part in section]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ConfigError(f"data.{split}: two sources are called {twice[0]!r}; give each a name of its own")
    parts = [_load_source(part, split, setting, context) for setting, part in named_sources(section, split)]
    return Mixture(names, parts, [getattr(part, "weight", 1.0) for part in section])


def named_sources(section: Section, split: str) -> list[tuple[str, SourceConfig]]:
    """Return the sources of a section, each with its setting: `data.train`, or `data.train[1]`."""
    if isinstance(section, SourceConfig):
        return [(f"data.{split}", section)]
    return [(f"data.{split}[{number}]", part) for number, part in enumerate(section)]


def open_rows(section: SourceConfig, split: str, setting: str, context: LoadContext) -> Iterator[Row]:
    """Yield the rows of a source as they are stored. Raises as `load_tasks` does, but for rows that are no tasks."""
    name, _, _ = parse_split(section.split, setting)
    opened = open_source(section, split, setting, name, context.seed)
    yield from opened.rows() if isinstance(opened, ArrowSource) else opened


def find_problems(section: SourceConfig, split: str, setting: str, context: LoadContext) -> Iterator[str]:
    """Yield what is wrong with each row of a source that is no task, in order."""
    for row in open_rows(section, split, setting, context):
        try:
            context.task(row, section)
        except DataError as error:
            yield str(error)


def _load_source(section: SourceConfig, split: str, setting: str, context: LoadContext) -> Sequence[Task]:
    name, start, end = parse_split(section.split, setting)
    opened = open_source(section, split, setting, name, context.seed)
    tasks: Sequence[Task]
    if isinstance(opened, ArrowSource):
        tasks = opened.tasks(context.columns_of(section), lambda row: context.task(row, section))
    else:
        tasks = [context.task(row, section) for row in opened]
        check_distinct(section.source, (task.task_id for task in tasks))
    tasks = take_range(tasks, start, end)
    if not tasks:
        part = f" in {section.split!r}" if section.split else ""
        raise DataError(
            f"{section.source} has no tasks{part} (split {split!r}, options {section.options}); check {setting}"
        )
    return tasks
