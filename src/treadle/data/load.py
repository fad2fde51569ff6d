"""`load_tasks`: the checked tasks of `data.train` or `data.held_out`, from any kind of storage.

A source is a file, a directory of them, a Hugging Face data set, or a generator: a function `(split, **options)` that
yields tasks or rows, registered under `treadle.tasks` or written as `module:attribute`. `split` is `train` or
`held_out`; an optional parameter `file_split` receives `data.train.split`. A .jsonl file has one row per line:

    {"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "ground_truth": "7", "extras": {"a": 3}}
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.core import registry
from treadle.core.errors import ConfigError, DataError
from treadle.core.images import ImageLimits
from treadle.core.registry import how_to_install
from treadle.core.types import Task, as_messages
from treadle.data.config import SUFFIXES, Columns, SourceConfig, sources_of
from treadle.data.rows import PROMPT, Row, make_task, parse_json
from treadle.data.tasks import (
    Mixture,
    Player,
    check_distinct,
    parse_split,
    take_range,
    task_ids,
    tasks_of,
    with_player,
)
from treadle.envs.base import Environment
from treadle.envs.tasks import load_environment, made_class

if TYPE_CHECKING:
    from treadle.data.table import ArrowTable  # needs pyarrow

_OTHERS = (".json", ".csv", ".tsv", ".txt", ".yaml", ".yml", ".arrow", ".gz", ".zst")
_ALL = "all"  # the split with all rows
_SAVED = ("state.json", "dataset_dict.json")  # written by `datasets` into a data set's directory
_SHARD = re.compile(r"[-_.]?\d.*")


@dataclass(frozen=True)
class LoadContext:
    """Settings common to all sources of a run.

    columns: default for sources without their own. player: default player for tasks that name none (`Task.player`).
    environments: classes or factories by name, beside the registry's. seed: for generators that take one. images:
    limits of images in prompts.
    """

    columns: Columns | None = None
    player: Player = ("environment", "")
    environments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    images: ImageLimits | None = None

    def columns_of(self, section: SourceConfig) -> Columns | None:
        """Return the paths of a task's parts in a source's rows."""
        return self.columns if section.columns is None else section.columns

    def task(self, row: Row, section: SourceConfig) -> Task:
        """Return a row's task. Raises DataError, also for a missing prompt unless the player makes one."""
        if isinstance(row.value, Task):
            task = row.value
            as_messages([m for m in task.prompt if m.get("images")], f"{row.where}: prompt", self.images)
        else:
            task = make_task(row, self.columns_of(section), self.images)
        task = with_player(task, self.player)
        kind, name = task.player
        if not task.prompt and not isinstance(row.value, Task) and kind == "environment":
            maker = made_class(self.environments.get(name) or (load_environment(name) if name else Environment))
            if getattr(maker, "reset", None) is Environment.reset:
                owner = f"environment {name!r} does not make its own" if name else "no environment"
                value = parse_json(row.value, row.where) if isinstance(row.value, bytes) else row.value
                raise DataError(
                    f'{row.where}: no prompt, and {owner}; write "prompt": {PROMPT}, or set data.columns.prompt '
                    f"(there are {', '.join(value) or 'no columns'})"
                )
        return task


Section = SourceConfig | tuple[SourceConfig, ...]
"""`data.train` or `data.held_out`."""


def load_tasks(section: Section, split: str, context: LoadContext) -> Sequence[Task]:
    """Return all tasks of a section, in order: at least one, and each `task_id` once. Rows are checked.

    split: `train` or `held_out`, the section's key in `data`.

    Raises ConfigError for a missing file, data set or generator, or unknown options; DataError for an invalid row or
    generator result; the message names file and row.
    """
    names = [part.name or _short_name(part.source) for part in sources_of(section)]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise ConfigError(f"data.{split}: two sources are called {twice[0]!r}; give each a name of its own")
    parts = [_load_source(part, split, setting, context) for setting, part in named_sources(section, split)]
    if isinstance(section, SourceConfig):
        return parts[0]
    return Mixture(names, parts, [getattr(part, "weight", 1.0) for part in section])


def named_sources(section: Section, split: str) -> list[tuple[str, SourceConfig]]:
    """Return the sources of a section, each with its setting: `data.train`, or `data.train[1]`."""
    if isinstance(section, SourceConfig):
        return [(f"data.{split}", section)]
    return [(f"data.{split}[{number}]", part) for number, part in enumerate(section)]


def _load_source(section: SourceConfig, split: str, setting: str, context: LoadContext) -> Sequence[Task]:
    name, start, end = parse_split(section.split, setting)
    opened = open_source(section, split, setting, name, context.seed)
    tasks: Sequence[Task]
    if isinstance(opened, Iterator):
        tasks = tasks_of(opened, lambda row: context.task(row, section))
        check_distinct(section.source, task_ids(tasks))
    else:
        tasks = opened.tasks(context.columns_of(section), lambda row: context.task(row, section))
    tasks = take_range(tasks, start, end)
    if not tasks:
        part = f" in {section.split!r}" if section.split else ""
        raise DataError(
            f"{section.source} has no tasks{part} (split {split!r}, options {section.options}); check {setting}"
        )
    return tasks


def open_rows(section: SourceConfig, split: str, setting: str, context: LoadContext) -> Iterator[Row]:
    """Yield the rows of a source as stored. Raises as `load_tasks` does, but not for invalid rows."""
    name, _, _ = parse_split(section.split, setting)
    opened = open_source(section, split, setting, name, context.seed)
    return opened if isinstance(opened, Iterator) else opened.rows()


def find_problems(section: SourceConfig, split: str, setting: str, context: LoadContext) -> Iterator[str]:
    """Yield the problem of each invalid row of a source, in order."""
    for row in open_rows(section, split, setting, context):
        try:
            context.task(row, section)
        except DataError as error:
            yield str(error)


def open_source(section: SourceConfig, split: str, setting: str, name: str, seed: int) -> Iterator[Row] | ArrowTable:
    """Open a source. name: one of its splits, or "". seed: for generators that take one.

    Raises ConfigError if it cannot be opened, or does not take the section's options.
    """
    source, path = section.source, Path(section.source)
    if path.is_dir():
        is_data_set = any((path / name).is_file() for name in _SAVED)
    else:  # ORG/NAME
        named = re.fullmatch(r"[\w.-]+/[\w.-]+", source) and path.suffix not in (*SUFFIXES, *_OTHERS)
        is_data_set = bool(named) and not path.exists()
    if is_data_set:
        opened: ArrowTable = _table(source, setting).open_data_set(
            source, "" if name == _ALL else name, section.options, setting
        )
        return opened
    files = _directory_files(path, name, setting) if path.is_dir() else _one_file(path, name, setting)
    if not files:
        return _open_generator(section, split, setting, name, seed)
    if section.options:
        raise ConfigError(
            f"{setting}.options: the file {source} takes no options, got {', '.join(section.options)}; "
            f"remove them ({setting}.options={{}})"
        )
    suffixes = {file.suffix for file in files.values()}
    if len(suffixes) > 1:
        raise ConfigError(
            f"{setting}.source: cannot read {path}: it holds {' and '.join(sorted(suffixes))} files; name one, or move "
            "them apart"
        )
    if suffixes == {".parquet"}:
        table = _table(source, setting)
        opened = table.ArrowTable([table.parquet_part(file, stem, f"{setting}.source") for stem, file in files.items()])
        return opened
    return (row for stem, file in files.items() for row in _read_jsonl(file, stem))


def _table(source: str, setting: str) -> Any:
    """Return `treadle.data.table`. Raises ConfigError without pyarrow."""
    try:
        from treadle.data import table
    except ModuleNotFoundError as error:
        missing = error.name or "pyarrow"
        raise ConfigError(f"{setting}.source: {source!r} needs {missing}; {how_to_install(missing)}") from error
    return table


def _one_file(path: Path, split: str, setting: str) -> dict[str, Path]:
    """Return the file, keyed by the prefix of its task ids; empty if `path` can only name a generator."""
    if path.suffix not in SUFFIXES:
        if path.suffix in _OTHERS or path.is_file():
            raise ConfigError(f"{setting}.source: {str(path)!r} is not a .jsonl or .parquet file; convert it to one")
        return {}
    if split not in ("", _ALL):
        raise ConfigError(f"{setting}.split: the file {path} has no split {split!r}; write all, or a part: all[:90%]")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(
            f"{setting}.source: cannot read {path}: {error.strerror}; check the path (it is relative to {Path.cwd()})"
        ) from error
    return {path.stem: path}


def _directory_files(directory: Path, split: str, setting: str) -> dict[str, Path]:
    """Return a split's files: `train` matches train-00000-of-00002.parquet and so on, `all` every file."""
    every = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES and path.is_file())
    if not every:
        raise ConfigError(
            f"{setting}.source: cannot read {directory}: a directory without .jsonl and .parquet files; check the path"
        )
    splits = {path: _SHARD.sub("", path.stem, count=1) for path in every}  # "" for 0000.parquet
    names = dict.fromkeys(splits.values())
    if split not in (_ALL, *names) and (split or len(names) > 1):
        wanted = f"there is no split {split!r}" if split else "it holds several splits"
        choices = ", ".join(filter(None, [*names, _ALL]))
        raise ConfigError(f"{setting}.split: {wanted} in {directory}; choose one of {choices}")
    return {f"{directory.name}/{path.stem}": path for path in every if split in ("", _ALL, splits[path])}


def _read_jsonl(path: Path, stem: str) -> Iterator[Row]:
    # Splits bytes, not text: JSON strings may contain characters that str.splitlines treats as line ends.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield Row(line, f"{path}:{number}", f"{stem}-{number:06d}", path.parent)


def _short_name(source: str) -> str:
    """Return `gsm8k` for openai/gsm8k, gsm8k.parquet and my_tasks:gsm8k."""
    return Path(source.rpartition(":")[2]).stem


def _open_generator(section: SourceConfig, split: str, setting: str, name: str, seed: int) -> Iterator[Row]:
    """Return the tasks and rows of a generator. Raises ConfigError.

    Passes the run's seed to a parameter `seed`, unless the recipe sets one, and the split's name to `file_split`.
    """
    source = section.source
    where, generator = f"{setting}.source: {source!r}", registry.resolve("tasks", source, f"{setting}.source")
    if not callable(generator):
        raise ConfigError(f"{where} is of type {type(generator).__name__}, it must be a function")
    signature = inspect.signature(generator)
    if name not in ("", _ALL) and "file_split" not in signature.parameters:
        raise ConfigError(
            f"{setting}.split: {source!r} is a generator, without a split {name!r}; write all, or a part: all[:90%]"
        )
    if "split" in section.options:
        raise ConfigError(f"{where}: 'split' is not an option, it is always {split!r} here; remove it")
    if "file_split" in signature.parameters and (file_split := section.options.get("file_split")) is not None:
        raise ConfigError(f"{setting}.options: write {setting}.split={file_split} in place of 'file_split'")
    defaults = {"seed": seed, "file_split": name}
    options = {key: value for key, value in defaults.items() if key in signature.parameters} | dict(section.options)
    # Checks only the call's shape: a TypeError from inside the generator is its own bug.
    try:
        signature.bind(split=split, **options)
    except TypeError as error:
        takes = ", ".join(name for name in signature.parameters if name not in ("split", "file_split")) or "none"
        got = ", ".join(section.options) or "none"
        raise ConfigError(f"{setting}.options of {source!r}: {error}; its options are {takes}, given: {got}") from error
    return _rows(generator(split=split, **options), where, f"{_short_name(source)}-{split}")


def _rows(generated: Iterable[Any], where: str, stem: str) -> Iterator[Row]:
    for number, row in enumerate(generated):
        if not isinstance(row, Task | Mapping):
            raise DataError(f"{where} must return Task objects or rows, got {row!r:.100}")
        yield Row(row, f"{where}: row {number} (counted from 0)", f"{stem}-{number:06d}")
