"""Opening a source: rows of JSON lines and generators, a table of Parquet and Hugging Face data sets.

A generator is a function `(split, **options)` that yields tasks or rows; it is registered under `treadle.tasks` or
written as `module:attribute`. `split` is `train` or `held_out`; an optional parameter `file_split` receives the name in
`data.train.split`. A .jsonl file has one row a line:

    {"prompt": [{"role": "user", "content": "What is 3 + 4?"}], "ground_truth": "7", "extras": {"a": 3}}
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from treadle.core import registry
from treadle.core.errors import ConfigError, DataError
from treadle.core.registry import how_to_install
from treadle.core.types import Task
from treadle.data.config import Columns, SourceConfig
from treadle.data.files import ALL, find_files, is_data_set
from treadle.data.rows import Row
from treadle.data.tasks import LazyTasks


@runtime_checkable
class ArrowSource(Protocol):
    """An opened table (`table.ArrowTable`); defined here because that module needs pyarrow."""

    def tasks(self, columns: Columns | None, make: Callable[[Row], Task]) -> LazyTasks:
        """Return its tasks, checked."""
        ...

    def rows(self) -> Iterator[Row]:
        """Yield its rows, with all columns."""
        ...


def open_source(section: SourceConfig, split: str, setting: str, name: str, seed: int) -> Iterator[Row] | ArrowSource:
    """Open a source. name: of one of its splits, or "". seed: for generators that take one.

    Raises ConfigError for what cannot be opened, or does not take the section's options.
    """
    source = section.source
    if is_data_set(source):
        return _arrow("hub", source, setting).open_data_set(source, name, section.options, setting)  # type: ignore[no-any-return]
    files = find_files(source, name, setting)
    if files is None:
        return _open_generator(section, split, setting, name, seed)
    if section.options:
        raise ConfigError(
            f"{setting}.options: the file {source} takes no options, got {', '.join(section.options)}; "
            f"remove them ({setting}.options={{}})"
        )
    if files.suffix == ".parquet":
        table, where = _arrow("table", source, setting), f"{setting}.source"
        return table.ArrowTable([table.parquet_part(path, stem, where) for stem, path in files.paths.items()])  # type: ignore[no-any-return]
    return (row for stem, path in files.paths.items() for row in _read_jsonl(path, stem))


def short_name(source: str) -> str:
    """Return `gsm8k` for openai/gsm8k, gsm8k.parquet and my_tasks:gsm8k."""
    return Path(source.rpartition(":")[2]).stem


def _arrow(module: str, source: str, setting: str) -> Any:
    """Return `treadle.data.table` or `treadle.data.hub`. Raises ConfigError without pyarrow."""
    try:
        return importlib.import_module(f"treadle.data.{module}")
    except ModuleNotFoundError as error:
        missing = error.name or "pyarrow"
        raise ConfigError(f"{setting}.source: {source!r} needs {missing}; {how_to_install(missing)}") from error


def _read_jsonl(path: Path, stem: str) -> Iterator[Row]:
    # Bytes are split, not text: JSON strings may hold characters that str.splitlines takes for line ends.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield Row(line, f"{path}:{number}", f"{stem}-{number:06d}")


def _load_generator(source: str, setting: str) -> Callable[..., Iterable[Any]]:
    generator: Callable[..., Iterable[Any]] = registry.resolve("tasks", source, f"{setting}.source")
    if not callable(generator):
        raise ConfigError(f"{setting}.source: {source!r} is of type {type(generator).__name__}, it must be a function")
    return generator


def _open_generator(section: SourceConfig, split: str, setting: str, name: str, seed: int) -> Iterator[Row]:
    """Return the tasks and rows of a generator.

    One with parameters `seed` and `file_split` gets the run's seed, unless the recipe sets one, and the split's name.
    Raises ConfigError.
    """
    source = section.source
    where, generator = f"{setting}.source: {source!r}", _load_generator(source, setting)
    parameters = inspect.signature(generator).parameters
    if name not in ("", ALL) and "file_split" not in parameters:
        raise ConfigError(
            f"{setting}.split: {source!r} is a generator, without a split {name!r}; write all, or a part: all[:90%]"
        )
    if "split" in section.options:
        raise ConfigError(f"{where}: 'split' is not an option, it is always {split!r} here; remove it")
    if "file_split" in parameters and (file_split := section.options.get("file_split")) is not None:
        raise ConfigError(f"{setting}.options: write {setting}.split={file_split} in place of 'file_split'")
    defaults = {"seed": seed, "file_split": name}
    options = {key: value for key, value in defaults.items() if key in parameters} | dict(section.options)
    try:  # only the call's shape is checked here: a TypeError from inside the generator is a bug of its own
        inspect.signature(generator).bind(split=split, **options)
    except TypeError as error:
        takes = ", ".join(name for name in parameters if name not in ("split", "file_split")) or "none"
        got = ", ".join(section.options) or "none"
        raise ConfigError(f"{setting}.options of {source!r}: {error}; its options are {takes}, given: {got}") from error
    return _generated(generator(split=split, **options), where, f"{short_name(source)}-{split}")


def _generated(generated: Iterable[Any], where: str, stem: str) -> Iterator[Row]:
    for number, row in enumerate(generated):
        if not isinstance(row, Task | Mapping):
            raise DataError(f"{where} must return Task objects or rows, got {row!r:.100}")
        yield Row(row, f"{where}: row {number} (counted from 0)", f"{stem}-{number:06d}")
