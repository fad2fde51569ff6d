"""`ArrowTasks`: the tasks of Parquet files and Hugging Face data sets, read row by row when they are asked for.

    Part.batches -> every batch checked -> a temporary Arrow file, mapped into memory -> one row -> Task

Only the columns that tasks are made of are read, once and in order, and memory holds one batch at a time. Parquet
itself cannot be read row by row: for each task, a shuffled visit would decode a row group, often the whole file.
"""

from __future__ import annotations

import hashlib
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.data.arrow_checks import is_list, is_text, is_well_formed, leaf
from treadle.data.config import Columns
from treadle.data.rows import KEYS, OWN_NAMES, Row, unknown_key
from treadle.data.tasks import LazyTasks, Player, check_distinct

_BATCH = 4096  # rows that are decoded and checked at a time
_CORRECT = "correct data.columns"


@dataclass(frozen=True)
class Part:
    """One Parquet file, or a whole Hugging Face data set.

    path: for messages. stem: begins the ids of its tasks. batches: yields the rows, in order, with these columns and
    paths. files: hashed to recognize the data.
    """

    path: str
    stem: str
    schema: Any
    batches: Callable[[list[str]], Iterator[Any]]
    files: Sequence[Path]


class ArrowTable:
    """An opened table of one or more parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def tasks(self, columns: Columns | None, make: Callable[[Row], Task]) -> ArrowTasks:
        return ArrowTasks(self._parts, columns, make)

    def rows(self) -> Iterator[Row]:
        """Yield its rows, with all columns. Raises DataError for one that cannot be read."""
        for part in self._parts:
            number = 0
            for batch in part.batches(part.schema.names):
                for row in range(len(batch)):
                    yield _row(batch, row, part, number + row)
                number += len(batch)


def parquet_part(path: Path, stem: str, setting: str) -> Part:
    """Open a Parquet file. stem: begins the ids of its tasks.

    Raises ConfigError for a file that cannot be opened, DataError for one that is not Parquet.
    """
    with _reading(path, setting):
        schema = pq.read_schema(path)

    def batches(columns: list[str]) -> Iterator[Any]:
        with _reading(path, setting):  # without pre_buffer, which holds a whole row group, perhaps the whole file
            file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            yield from file.iter_batches(batch_size=_BATCH, columns=columns, use_threads=False)

    return Part(str(path), stem, schema, batches, (path,))


def dataset_part(dataset: Any, path: str, stem: str) -> Part:
    """Return a `datasets.Dataset` as a part."""

    def batches(columns: list[str]) -> Iterator[Any]:
        column_names = dataset.column_names
        names = dict.fromkeys(path if path in column_names else path.partition(".")[0] for path in columns)
        for table in dataset.select_columns(list(names)).with_format("arrow").iter(batch_size=_BATCH):
            yield from table.combine_chunks().to_batches()

    files = [Path(each["filename"]) for each in dataset.cache_files]
    return Part(path, stem, dataset.features.arrow_schema, batches, files)


@contextmanager
def _reading(path: Path, setting: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {_first_line(error)}; write the file again") from error
    except OSError as error:
        why = error.strerror or _first_line(error)
        raise ConfigError(f"{setting}: cannot read {path}: {why}; check the path, and whether it is damaged") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class ArrowTasks(LazyTasks):
    """The tasks of a table. All rows are checked when it is made; then each is read when it is asked for.

    make: returns the task in a row, with what plays it, or raises DataError.

    Raises ConfigError or DataError, which name file, row and remedy.
    """

    def __init__(self, parts: Sequence[Part], columns: Columns | None, make: Callable[[Row], Task]) -> None:
        self._parts, self._make = parts, make
        self._paths = _paths_in_table(parts[0], columns)
        self._ids: list[Any] | None = [] if "task_id" in self._paths else None  # a string array for each batch
        self._players: set[Player] = set()
        self._starts: list[int] = []  # number of the first row of each batch
        self._part_starts: list[int] = []
        self._size = 0
        self._table = self._spill()
        if self._ids and pc.count_distinct(pa.chunked_array(self._ids)).as_py() < self._size:
            check_distinct(parts[0].path, self.task_ids())

    def __len__(self) -> int:
        return self._size

    def _at(self, number: int) -> Task:
        batch = bisect_right(self._starts, number) - 1
        return self._task(self._table.get_batch(batch), number - self._starts[batch], number)

    def task_ids(self) -> Iterator[str]:
        if self._ids is not None:
            for batch in self._ids:
                yield from batch.to_pylist()
            return
        for part, start, end in zip(self._parts, self._part_starts, [*self._part_starts[1:], self._size], strict=True):
            for row in range(end - start):
                yield _default_id(part, row)

    def players(self) -> set[Player]:
        return self._players

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for path in (path for part in self._parts for path in part.files):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def _task(self, batch: Any, row: int, number: int) -> Task:
        return self._make(_row(batch, row, *self._place(number)))

    def _place(self, number: int) -> tuple[Part, int]:
        part = bisect_right(self._part_starts, number) - 1
        return self._parts[part], number - self._part_starts[part]

    # --- reading everything once ----------------------------------------------------------------------------------

    def _spill(self) -> Any:
        """Check all rows, and return an Arrow file with what tasks are made of, whose name is gone already."""
        with _writing(), tempfile.NamedTemporaryFile(prefix="treadle-", suffix=".arrow") as file:
            batches = self._checked_batches()
            first = next(batches, None)
            if first is None:
                return None
            with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, first.schema) as writer:
                for batch in chain([first], batches):
                    writer.write_batch(batch)
            return pa.ipc.open_file(pa.memory_map(file.name))

    def _checked_batches(self) -> Iterator[Any]:
        """Yield the batches, all of one schema. Raises DataError for the first row that makes no task."""
        paths = ([path] if isinstance(path, str) else path.values() for path in self._paths.values())
        columns, schema = list(dict.fromkeys(chain.from_iterable(paths))), None
        for part in self._parts:
            self._part_starts.append(self._size)
            for batch in part.batches([_readable_path(part, path) for path in columns]):
                if len(batch):
                    schema = schema or batch.schema.remove_metadata()
                    batch = _as_schema(batch, schema, part, self._parts[0])
                    self._starts.append(self._size)
                    self._size += len(batch)
                    self._check(batch)
                    yield batch

    def _check(self, batch: Any) -> None:
        """Check the batch's rows one by one, unless it is well formed: then the first stands for all."""
        start, certain = self._starts[-1], is_well_formed(batch, self._paths)
        tasks = [self._task(batch, row, start + row) for row in range(1 if certain else len(batch))]
        self._players.update(task.player for task in tasks)
        if self._ids is not None:
            ids = leaf(batch, str(self._paths["task_id"])) if certain else pa.array([task.task_id for task in tasks])
            self._ids.append(ids.cast(pa.string()))


def _paths_in_table(part: Part, columns: Columns | None) -> dict[str, str | dict[str, str]]:
    """Return where the parts of a task are, by name. Raises ConfigError for a column that is not there."""
    names = part.schema.names
    if columns is None:
        if unknown := [name for name in names if name not in KEYS]:
            raise ConfigError(f"{part.path}: {unknown_key(unknown[0])}")
        return {name: name for name in names}
    paths = {name: name for name in OWN_NAMES if name in names} | dict(columns)
    if not paths:
        raise ConfigError(f"{part.path}: none of its columns is read ({', '.join(names)}); set data.columns.prompt")
    return paths


def _readable_path(part: Part, path: str) -> str:
    """Return the path, up to where it leads into a list. Raises ConfigError, which says how far it leads."""
    if path in part.schema.names:
        return path
    passed: list[str] = []
    kind: Any = pa.struct(list(part.schema))
    for key in path.split("."):
        if not pa.types.is_struct(kind):
            if pa.types.is_nested(kind):
                break
            raise ConfigError(f"{part.path}: no column {path!r}: {'.'.join(passed)!r} is of type {kind}; {_CORRECT}")
        fields = [each.name for each in kind]
        if key not in fields:
            place = f"{'.'.join(passed)!r}" if passed else "the file"
            raise ConfigError(f"{part.path}: no column {path!r}: {place} has {', '.join(fields)}; {_CORRECT}")
        kind = kind.field(key).type
        passed.append(key)
    return ".".join(passed)


def _as_schema(batch: Any, schema: Any, part: Part, first: Part) -> Any:
    """Return the batch with the first one's schema. Raises DataError for a column of another type."""
    if batch.schema.equals(schema):
        return batch
    for name, kind in zip(schema.names, schema.types, strict=True):
        if not _is_alike(kind, other := batch.schema.field(name).type):
            raise DataError(
                f"{part.path}: column {name!r} is of type {other}, and of type {kind} in {first.path}; store it as one"
            )
    return batch.select(schema.names).cast(schema)


def _is_alike(kind: Any, other: Any) -> bool:
    """Return whether two types differ at most in the width of offsets and in what may be null."""
    if pa.types.is_struct(kind) and pa.types.is_struct(other):
        names = [field.name for field in kind]
        return names == [field.name for field in other] and all(
            _is_alike(kind.field(name).type, other.field(name).type) for name in names
        )
    if is_list(kind) and is_list(other):
        return _is_alike(kind.value_type, other.value_type)
    return bool(kind == other) or (is_text(kind) and is_text(other))


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"could not write to {tempfile.gettempdir()}: {error}; set TMPDIR to a directory with room"
        ) from error


def _row(batch: Any, row: int, part: Part, number: int) -> Row:
    """Return a row of a batch, without Treadle's own keys that are null: they are what a missing key is in JSON.

    number: of the row in its part. Raises DataError for text that is not UTF-8.
    """
    where = f"{part.path}: row {number} (counted from 0)"
    try:
        [fields] = batch.slice(row, 1).to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error}; write the file with text in UTF-8") from error
    present = {name: value for name, value in fields.items() if value is not None or name not in KEYS}
    return Row(present, where, _default_id(part, number))


def _default_id(part: Part, row: int) -> str:
    return f"{part.stem}-{row:06d}"
