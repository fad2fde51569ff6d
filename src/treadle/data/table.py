"""`ArrowTasks`: the tasks of Parquet files and Hugging Face data sets, read row by row on demand.

    Part.batches -> every batch checked -> a temporary Arrow file, mapped into memory -> one row -> Task

Only the columns used by tasks are read, once and in order, and memory holds one batch at a time. Parquet itself has no
random access to rows: for each task, a shuffled visit would decode a row group, often the whole file.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from treadle.core.errors import ConfigError, DataError
from treadle.core.registry import how_to_install
from treadle.core.text import DEEPEST
from treadle.core.types import PLAYERS, Task
from treadle.data.config import Columns
from treadle.data.rows import KEYS, OWN_NAMES, ArrowData, Row, unknown_key
from treadle.data.tasks import LazyTasks, Player, check_distinct

_BATCH = 4096  # rows decoded and checked at a time
_BATCH_OF_IMAGES = 64


@dataclass(frozen=True)
class Part:
    """One Parquet file, or a whole Hugging Face data set.

    path: for messages. stem: prefix of its tasks' ids. batches: yields the rows, in order, with these columns and
    paths.
    files: hashed to recognize the data. folder: where paths of images begin.
    """

    path: str
    stem: str
    schema: Any
    batches: Callable[[list[str]], Iterator[Any]]
    files: Sequence[Path]
    folder: Path | None = None

    def row(self, batch: Any, place: int, number: int) -> Row:
        """Return a row of a batch, without null values of Treadle's own keys, which correspond to missing keys in JSON.

        number: index of the row in the part. Raises DataError for text that is not UTF-8.
        """
        where = f"{self.path}: row {number} (counted from 0)"
        try:
            [fields] = batch.slice(place, 1).to_pylist()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8: {error}; write the file with text in UTF-8") from error
        present = {name: value for name, value in fields.items() if value is not None or name not in KEYS}
        return Row(present, where, self.default_id(number), self.folder)

    def default_id(self, number: int) -> str:
        return f"{self.stem}-{number:06d}"


def parquet_part(path: Path, stem: str, setting: str) -> Part:
    """Open a Parquet file. Raises ConfigError if it cannot be opened, DataError if it is not Parquet."""
    with _reading(path, setting):
        schema = pq.read_schema(path)

    def batches(columns: list[str]) -> Iterator[Any]:
        # No pre_buffer: it keeps a whole row group in memory, perhaps the whole file.
        with _reading(path, setting):
            file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            yield from file.iter_batches(batch_size=_batch_size(schema), columns=columns, use_threads=False)

    return Part(str(path), stem, schema, batches, (path,), path.parent)


def _batch_size(schema: Any) -> int:
    return _BATCH_OF_IMAGES if any("binary" in str(kind) for kind in schema.types) else _BATCH


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


def open_data_set(source: str, split: str, options: Mapping[str, Any], setting: str) -> ArrowTable:
    """Open a split of a Hugging Face data set: from the hub, its cache, or a directory with a saved one.

    split: its name; "" if there is only one. options: passed to `datasets.load_dataset` (name, revision, data_dir,
    ...). Raises ConfigError for a missing data set or split, or if `datasets` is not installed.
    """
    if "split" in options:
        raise ConfigError(f"{setting}.options: 'split' is not an option; write {setting}.split={options['split']}")
    try:
        import datasets
    except ModuleNotFoundError as error:
        missing = error.name or "datasets"
        raise ConfigError(f"{setting}.source: {source!r} needs {missing}; {how_to_install(missing)}") from error
    if not Path(source).is_dir():
        opened: Any = _load_data_set(datasets, source, options, setting)
    elif options:
        raise ConfigError(f"{setting}.options: the directory {source} takes no options; remove {', '.join(options)}")
    else:
        opened = datasets.load_from_disk(source)
    splits = dict(opened) if isinstance(opened, dict) else {str(opened.split or ""): opened}
    if split not in splits and (split or len(splits) > 1):
        wanted = f"there is no split {split!r}" if split else "it has several splits"
        raise ConfigError(f"{setting}.split: {wanted} in {source}; choose one of {', '.join(filter(None, splits))}")
    dataset = splits[split] if split in splits else next(iter(splits.values()))
    if not isinstance(dataset, datasets.Dataset):
        raise ConfigError(f"{setting}.options: {source!r} was opened as a stream, which cannot be indexed; remove it")

    def batches(columns: list[str]) -> Iterator[Any]:
        names = dict.fromkeys(path if path in dataset.column_names else path.partition(".")[0] for path in columns)
        batch_size = _batch_size(dataset.features.arrow_schema)
        for table in dataset.select_columns(list(names)).with_format("arrow").iter(batch_size=batch_size):
            yield from table.combine_chunks().to_batches()

    name = split or str(dataset.split or "")
    path, stem = f"{source}{f', split {name}' if name else ''}", "-".join(filter(None, (Path(source).name, name)))
    files = [Path(each["filename"]) for each in dataset.cache_files]
    return ArrowTable([Part(path, stem, dataset.features.arrow_schema, batches, files)])


def _load_data_set(datasets: Any, source: str, options: Mapping[str, Any], setting: str) -> Any:
    try:
        return datasets.load_dataset(source, **options)
    except ConnectionError as error:
        raise ConfigError(
            f"{setting}.source: no file, directory or cached data set {source!r}, and the hub cannot be reached, or "
            "nothing is downloaded (HF_HUB_OFFLINE, or a dry run); give a file, or load the data set once where the "
            f"hub can be reached (cache: {datasets.config.HF_DATASETS_CACHE}, HF_DATASETS_CACHE)"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}.source: no file or directory {source!r}, and the hub's data set cannot be loaded: "
            f"{_first_line(error)}; check the name, and HF_TOKEN for one that is private or gated"
        ) from error


def rows_of(data: ArrowData, name: str) -> list[dict[str, Any]]:
    """Return the rows of a DataFrame or a table as Parquet would store them, without an index. Raises DataError."""
    try:
        table = pa.table(data)
    except pa.ArrowException as error:
        raise DataError(f"{name}: {_first_line(error)}; give each column values of one type") from error
    index = (table.schema.pandas_metadata or {}).get("index_columns", [])
    rows: list[dict[str, Any]] = table.drop_columns([column for column in index if isinstance(column, str)]).to_pylist()
    return rows


class ArrowTable:
    """An opened table of one or more parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def tasks(self, columns: Columns | None, make: Callable[[Row], Task]) -> ArrowTasks:
        return ArrowTasks(self._parts, columns, make)

    def rows(self) -> Iterator[Row]:
        """Yield its rows, with all columns. Raises DataError for an unreadable row."""
        for part in self._parts:
            number = 0
            for batch in part.batches(part.schema.names):
                yield from (part.row(batch, place, number + place) for place in range(len(batch)))
                number += len(batch)


class ArrowTasks(LazyTasks):
    """The tasks of a table. All rows are checked on construction, then read on demand.

    make: returns a row's task with its player, or raises DataError.

    Raises ConfigError or DataError, which name file, row and remedy.
    """

    def __init__(self, parts: Sequence[Part], columns: Columns | None, make: Callable[[Row], Task]) -> None:
        self._parts, self._make = parts, make
        self._paths = _paths_in_table(parts[0], columns)
        self._ids: list[Any] | None = [] if "task_id" in self._paths else None  # one string array per batch
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
            return (task_id for batch in self._ids for task_id in batch.to_pylist())
        parts = zip(self._parts, self._part_starts, [*self._part_starts[1:], self._size], strict=True)
        return (part.default_id(row) for part, start, end in parts for row in range(end - start))

    def players(self) -> set[Player]:
        return self._players

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for path in (path for part in self._parts for path in part.files):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def _task(self, batch: Any, place: int, number: int) -> Task:
        part = bisect_right(self._part_starts, number) - 1
        return self._make(self._parts[part].row(batch, place, number - self._part_starts[part]))

    # --- reading everything once ----------------------------------------------------------------------------------

    def _spill(self) -> Any:
        """Check all rows, and return an already unlinked Arrow file with the data of the tasks."""
        try:
            with tempfile.NamedTemporaryFile(prefix="treadle-", suffix=".arrow") as file:
                batches = self._checked_batches()
                first = next(batches, None)
                if first is None:
                    return None
                with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, first.schema) as writer:
                    for batch in chain([first], batches):
                        writer.write_batch(batch)
                return pa.ipc.open_file(pa.memory_map(file.name))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"could not write to {tempfile.gettempdir()}: {why}; set TMPDIR to a directory with room"
            ) from error

    def _checked_batches(self) -> Iterator[Any]:
        """Yield the batches, all of one schema. Raises DataError for the first invalid row."""
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
        """Check the batch's rows one by one, unless it is well formed: then the first row represents all."""
        start, certain = self._starts[-1], is_well_formed(batch, self._paths)
        tasks = [self._task(batch, row, start + row) for row in range(1 if certain else len(batch))]
        self._players.update(task.player for task in tasks)
        if self._ids is not None:
            ids = _leaf(batch, str(self._paths["task_id"])) if certain else pa.array([task.task_id for task in tasks])
            self._ids.append(ids.cast(pa.string()))


def _paths_in_table(part: Part, columns: Columns | None) -> dict[str, str | dict[str, str]]:
    """Return the paths of a task's parts, by name. Raises ConfigError for a missing column."""
    names = part.schema.names
    if columns is None:
        if unknown := [name for name in names if name not in KEYS]:
            raise ConfigError(f"{part.path}: {unknown_key(unknown[0], names)}")
        return {name: name for name in names}
    paths = {name: name for name in OWN_NAMES if name in names} | dict(columns)
    if not paths:
        raise ConfigError(f"{part.path}: none of its columns is used ({', '.join(names)}); set data.columns.prompt")
    return paths


def _readable_path(part: Part, path: str) -> str:
    """Return the path, up to where it leads into a list. Raises ConfigError that says how far it leads."""
    if path in part.schema.names:
        return path
    passed: list[str] = []
    kind: Any = pa.struct(list(part.schema))
    for key in path.split("."):
        place = f"{'.'.join(passed)!r}" if passed else "the file"
        if not pa.types.is_struct(kind):
            if pa.types.is_nested(kind):
                break
            problem = f"is of type {kind}"
        elif kind.get_field_index(key) < 0:
            problem = f"has {', '.join(each.name for each in kind)}"
        else:
            kind = kind.field(key).type
            passed.append(key)
            continue
        raise ConfigError(f"{part.path}: no column {path!r}: {place} {problem}; correct data.columns")
    return ".".join(passed)


def _as_schema(batch: Any, schema: Any, part: Part, first: Part) -> Any:
    """Cast the batch to the first one's schema, which may differ in the width of offsets and in nullability.

    Raises DataError for a column of another type.
    """
    for name, kind in zip(schema.names, schema.types, strict=True):
        plain, other = (re.sub("large_| not null", "", str(each)) for each in (kind, batch.schema.field(name).type))
        if plain != other:
            raise DataError(
                f"{part.path}: column {name!r} is of type {other}, and of type {plain} in {first.path}; store it as one"
            )
    batch = batch.select(schema.names).replace_schema_metadata(None)
    # Not where it changes nothing: Arrow's cast breaks nested fields without a value.
    return batch if batch.schema.equals(schema) else batch.cast(schema)


# --- fast validation of whole batches, without a Python object per row ------------------------------------------------


def is_well_formed(batch: Any, paths: Mapping[str, str | Mapping[str, str]]) -> bool:
    """Return whether each row of a `pyarrow.RecordBatch` certainly makes a task, with any prompt column.

    Otherwise a row may be faulty: the rows are then made into tasks one by one to name the first faulty one.
    paths: paths of a task's parts, by name; extras also as a mapping.
    """
    try:
        # Includes a check that text is UTF-8.
        batch.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return not any(player in paths for player in PLAYERS) and all(
        _is_part(batch, name, where) for name, where in paths.items()
    )


def _is_part(batch: Any, name: str, where: str | Mapping[str, str]) -> bool:
    arrays = [_leaf(batch, path) for path in ([where] if isinstance(where, str) else where.values())]
    if any(array is None for array in arrays):
        return False
    array: Any = arrays[0] if arrays else None
    if name == "prompt":
        return _is_prompt(array)
    if name == "task_id":
        has_text = _is_text(array.type) and _has_no_empty(array, pc.binary_length)
        return has_text or (pa.types.is_integer(array.type) and array.null_count == 0)
    if name == "extras" and isinstance(where, str) and (not pa.types.is_struct(array.type) or array.null_count):
        return False
    return all(map(_is_json, arrays))


def _leaf(batch: Any, path: str) -> Any:
    """Return the array at a path; None if any object on the way is missing, or it leads into a list."""
    first, *rest = [path] if path in batch.schema.names else path.split(".")
    array = batch.column(first)
    for key in rest:
        if array.null_count or not pa.types.is_struct(array.type):
            return None
        array = array.field(key)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _is_prompt(array: Any) -> bool:
    if _is_text(array.type):
        like_json = pc.any(pc.match_substring_regex(array, r"^\s*[\[{]")).as_py()  # possibly messages
        return _has_no_empty(array, pc.binary_length) and not like_json
    if not (_is_list(array.type) and pa.types.is_struct(array.type.value_type)):
        return False
    messages = array.flatten()
    if not _has_no_empty(array, pc.list_value_length) or messages.null_count:
        return False
    fields = {field.name: messages.field(number) for number, field in enumerate(messages.type)}
    if any(name not in fields or not _is_text(fields[name].type) or fields[name].null_count for name in _ALWAYS):
        return False
    others = [(name, array) for name, array in fields.items() if name not in _ALWAYS and array.null_count < len(array)]
    return all(name in _SOMETIMES and _is_text(array.type) for name, array in others)


_ALWAYS, _SOMETIMES = ("role", "content"), ("name", "reasoning_content", "tool_call_id")  # keys of messages of text


def _has_no_empty(array: Any, length: Any) -> bool:
    return array.null_count == 0 and bool(pc.all(pc.greater(length(array), 0)).as_py())


def _is_json(array: Any, levels: int = DEEPEST) -> bool:
    """Return whether the values of an array are certainly plain JSON data as Python objects."""
    kind = array.type
    if _is_list(kind):
        return levels > 0 and _is_json(array.flatten(), levels - 1)
    if pa.types.is_struct(kind):
        return levels > 0 and all(_is_json(array.field(n), levels - 1) for n in range(kind.num_fields))
    if pa.types.is_floating(kind):
        return bool(pc.all(pc.is_finite(array)).as_py())
    return _is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
