"""Tasks and environments by name: JSONL files, registered generators, and the checks generators share.

A task generator is a function `(split, **options) -> list[Task]`, registered under `treadle.tasks` or written
as `module:attribute`; `split` is `train` or `held_out`. A file holds one task a line:

    {"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "ground_truth": "7", "extras": {"a": 3}}
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from treadle.core import registry
from treadle.core.errors import ConfigError, DataError
from treadle.core.types import PLAYERS, Task, as_messages
from treadle.envs.base import Environment

SPLITS = ("train", "held_out")

_KEYS = ("task_id", "prompt", *PLAYERS, "ground_truth", "extras")
_METHODS = {"reset": "task", "step": "text", "close": ""}  # name -> what it takes besides self


def load_tasks(
    source: str,
    split: str,
    options: Mapping[str, Any],
    player: tuple[str, str] = ("environment", ""),
    environments: Mapping[str, Any] = MappingProxyType({}),
) -> list[Task]:
    """Return all tasks of `source`, in order: at least one, and no `task_id` twice.

    source: the path of a `.jsonl` file (one file a split: `split` selects nothing in it, and it takes no
    options), or a generator's registered name or `module:attribute`, called as
    `generator(split=split, **options)`.
    player: what plays the tasks that name nothing themselves, and its name (`Task.player`).
    environments: by name, classes or other makers that the registry need not know.

    Raises ConfigError: no such file or generator, or options it does not take. DataError: a row, or what a
    generator returned, breaks the contract; the message names file and line.
    """
    if source.endswith(".jsonl"):
        rows = _read_jsonl(Path(source), f"data.{split}.source")
        rows = {where: with_player(task, player) for where, task in rows.items()}
        _check_prompts(rows, environments)
        tasks = list(rows.values())
        if options:
            raise ConfigError(
                f"data.{split}.options: the file {source} takes no options, got {', '.join(options)}; "
                f"remove them (data.{split}.options={{}})"
            )
    else:
        tasks = [with_player(task, player) for task in _generate(source, split, options)]
    if not tasks:
        raise DataError(f"{source} has no tasks (split {split!r}, options {dict(options)})")
    _check_distinct(source, tasks)
    return tasks


def with_player(task: Task, player: tuple[str, str]) -> Task:
    """Return the task, played by this environment, agent or driver if it names nothing itself."""
    named: dict[str, Any] = dict([player])
    return task if task.player[1] else replace(task, **named)


def load_environment(name: str) -> type[Environment]:
    """Return the environment class `name` (registered, or `module:attribute`), checked before anything runs.

    Raises ConfigError: unknown name, not a class, a constructor that needs arguments, or one of `reset`,
    `step` and `close` missing.
    """
    return check_environment(registry.resolve("environments", name), name)


def check_environment(found: object, name: str) -> type[Environment]:
    """Return the class, if it is an environment's. Raises ConfigError as `load_environment` does."""
    if not inspect.isclass(found):
        raise ConfigError(f"environments: {name!r} is of type {type(found).__name__}, it must be a class")
    for method, argument in _METHODS.items():
        written = getattr(found, method, None)
        if callable(written) and written is not Environment.step:
            continue
        arguments = f"self, {argument}" if argument else "self"
        raise ConfigError(
            f"environments: {name!r}: {method} is missing; write 'def {method}({arguments})', async or not"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(
            f"environments: {name!r} is made without arguments, one for each attempt, but its constructor "
            f"says: {error}; give it a default, or read it from the task's extras in 'reset'"
        ) from error
    return cast(type[Environment], found)


def check_split(split: str) -> None:
    """Raise DataError unless `split` is `train` or `held_out`."""
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}; write {' or '.join(map(repr, SPLITS))}")


def check_count(count: int) -> None:
    """Raise ConfigError unless `count` is a whole number >= 0."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(f"count must be a whole number >= 0, got {count!r}")


def check_share(name: str, value: float) -> None:
    """Raise ConfigError unless `value` lies in [0, 1]."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is a share and must lie between 0 and 1, got {value!r}")


def load_generator(source: str, split: str) -> Callable[..., Sequence[Task]]:
    """Return the function `source` (registered, or `module:attribute`). Raises ConfigError."""
    setting = f"data.{split}.source"
    if source.endswith(_OTHER_FILES) or Path(source).is_file():
        raise ConfigError(f"{setting}: {source!r} is no .jsonl, a file of one JSON object a line; make it one")
    generator: Callable[..., Sequence[Task]] = registry.resolve("tasks", source, setting)
    if not callable(generator):
        raise ConfigError(f"{setting}: {source!r} is of type {type(generator).__name__}, it must be a function")
    return generator


def _generate(source: str, split: str, options: Mapping[str, Any]) -> Sequence[Task]:
    where, generator = f"data.{split}.source: {source!r}", load_generator(source, split)
    if "split" in options:
        raise ConfigError(f"{where}: 'split' is no option, it is always {split!r} here; remove it")
    signature = inspect.signature(generator)
    try:  # only the call's shape is checked here: a TypeError from inside the generator is a bug of its own
        signature.bind(split=split, **options)
    except TypeError as error:
        takes = ", ".join(name for name in signature.parameters if name != "split") or "none"
        given = ", ".join(options) or "none"
        setting = f"data.{split}.options of {source!r}"
        raise ConfigError(f"{setting}: {error}; its options are {takes}, given: {given}") from error
    tasks = list(generator(split=split, **options))
    wrong = next((task for task in tasks if not isinstance(task, Task)), None)
    if wrong is not None:
        raise DataError(f"{where} must return Task objects, got {wrong!r}")
    return tasks


def _check_distinct(source: str, tasks: Sequence[Task]) -> None:
    places: dict[str, int] = {}
    for number, task in enumerate(tasks):
        first = places.setdefault(task.task_id, number)
        if first != number:
            raise DataError(
                f"{source}: task_id {task.task_id!r} belongs to both task {first} and task {number} "
                "(counted from 0); give each its own"
            )


def _read_jsonl(path: Path, setting: str) -> dict[str, Task]:
    """Tasks by file and line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot read {path}: {error.strerror}; check the path (it is relative to {Path.cwd()})"
        ) from error
    tasks: dict[str, Task] = {}
    # Bytes are split, not text: JSON strings may hold characters that str.splitlines takes for line ends.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            tasks[where] = task_from_row(_parse_row(line, where), where, f"{path.stem}-{number:06d}")
    return tasks


def _parse_row(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except ValueError as error:  # bad UTF-8 or bad JSON
        raise DataError(f"{where}: not JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def task_from_row(row: Any, where: str, task_id: str) -> Task:
    """Return the task in a row of a file, or in a dict with the same keys.

    where: names the row in errors. task_id: for a row that has none. Raises DataError for anything else.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a row must be a JSON object, got {type(row).__name__}")
    if unknown := [key for key in row if key not in _KEYS]:
        raise DataError(f"{where}: unknown key {unknown[0]!r}; keys are {', '.join(_KEYS)} (put your own into extras)")
    task_id = _typed(row, "task_id", task_id, str, where)
    players = {kind: name for kind in PLAYERS if (name := _typed(row, kind, "", str, where))}
    prompt = as_messages(_typed(row, "prompt", [], list, where), f"{where}: prompt")
    extras = _typed(row, "extras", {}, dict, where)
    if not task_id:
        raise DataError(f"{where}: task_id must not be empty; leave it out to get one from the row's number")
    if len(players) > 1:
        named = " and ".join(f"{kind} {name!r}" for kind, name in players.items())
        raise DataError(f"{where}: names both {named}; leave one out")
    return Task(task_id, prompt, ground_truth=row.get("ground_truth"), extras=extras, **players)


def _check_prompts(tasks: Mapping[str, Task], environments: Mapping[str, Any]) -> None:
    """Raise DataError for a task without a prompt, unless an agent, a driver or its environment's `reset` makes one."""
    needing: dict[str, str] = {}  # environment -> the first row that relies on it for the prompt
    for where, task in tasks.items():
        kind, name = task.player
        if not task.prompt and kind == "environment":
            needing.setdefault(name, where)
    for environment, where in needing.items():
        maker = environments.get(environment) or (load_environment(environment) if environment else Environment)
        if getattr(maker, "reset", None) is Environment.reset:
            owner = f"environment {environment!r} does not make its own" if environment else "no environment"
            raise DataError(f'{where}: no prompt, and {owner}; write "prompt": {_PROMPT}')


def _typed(row: Mapping[str, Any], key: str, default: Any, kind: type, where: str) -> Any:
    value = row.get(key, default)
    if not isinstance(value, kind):
        remedy = f"; write {_PROMPT}" if key == "prompt" else ""
        raise DataError(f"{where}: {key} must be a JSON {_JSON[kind]}, got {value!r:.100}{remedy}")
    return value


_PROMPT = '[{"role": "user", "content": "..."}]'
_OTHER_FILES = (".json", ".csv", ".tsv", ".parquet", ".txt", ".yaml", ".yml")
_JSON: Mapping[type, str] = {str: "string", dict: "object", list: "array"}
