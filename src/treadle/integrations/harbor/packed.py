"""Tasks packed into a Parquet file, as data sets of Harbor tasks are published (CodeContests, for example).

    path: "code_contests-0001"   task_binary: a tar archive of the task's directory, compressed or not

Archives are foreign: nothing of them is written outside of its task's directory, no link, no device, and no more than
`MOST_FILES` files and `MOST_BYTES` bytes a task.
"""

from __future__ import annotations

import io
import itertools
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from treadle.core.errors import ConfigError, DataError
from treadle.core.registry import how_to_install
from treadle.core.text import escape_text

COLUMNS = ("path", "task_binary")
MOST_FILES = 10_000
MOST_BYTES = 2**30


def unpack(parquet: Path, directory: Path) -> int:
    """Write each packed task into a directory of its own below `directory`, which appears complete or not at all.

    Returns their number. Raises ConfigError for a file that cannot be read or a directory that is not empty, DataError
    for a row that is no task, or that would write elsewhere.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{str(directory)!r} is there already; name a new directory, or remove it")
    directory.absolute().parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.absolute().parent))
    try:
        number = 0
        for where, name, packed in _rows(parquet):
            _unpack_task(packed, made / name, where)
            number += 1
        if not number:
            raise DataError(f"{parquet} has no rows")
        if directory.exists():
            directory.rmdir()
        made.chmod(0o755)
        made.rename(directory)
        return number
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _rows(parquet: Path) -> Iterator[tuple[str, Path, bytes]]:
    """Yield each row's place, the task's path and its archive."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ConfigError(f"{parquet} needs pyarrow; {how_to_install('pyarrow')}") from error
    try:
        table = pq.ParquetFile(parquet)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{str(parquet)!r} cannot be read as a Parquet file: {error}") from error
    if missing := [name for name in COLUMNS if name not in table.schema_arrow.names]:
        have = ", ".join(table.schema_arrow.names)
        raise ConfigError(
            f"{parquet} has no column {missing[0]!r}, only {have}; packed tasks have {' and '.join(COLUMNS)}"
        )
    names: set[Path] = set()
    rows = itertools.count()
    for batch in table.iter_batches(batch_size=64, columns=list(COLUMNS)):
        for row in batch.to_pylist():
            where = f"{parquet}: row {next(rows)}"
            name = _inside(row["path"], where)
            if name in names:
                raise DataError(f"{where}: the path {str(name)!r} occurs twice")
            names.add(name)
            yield where, name, _bytes(row["task_binary"], where)


def _bytes(value: object, where: str) -> bytes:
    if not isinstance(value, bytes):
        raise DataError(f"{where}: task_binary is {value!r:.40}; it must be a tar archive, as bytes")
    return value


def _inside(path: Any, where: str) -> Path:
    """Return a relative path that leads nowhere else. Raises DataError for all others."""
    name = PurePosixPath(path) if isinstance(path, str) and "\0" not in path else PurePosixPath()
    if not name.parts or name.is_absolute() or ".." in name.parts or "\\" in path:
        raise DataError(
            f"{where}: the path {escape_text(repr(path)[:200])} leads out of the task's directory, or nowhere"
        )
    return Path(name)


def _unpack_task(packed: bytes, directory: Path, where: str) -> None:
    files, size = 0, 0
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                if member.isdir():
                    continue
                name = _inside(member.name, where)
                if not member.isreg():
                    raise DataError(f"{where}: {str(name)!r} is a link or a device; a task is made of files")
                files, size = files + 1, size + member.size
                if files > MOST_FILES or size > MOST_BYTES:
                    raise DataError(f"{where}: more than {MOST_FILES} files or {MOST_BYTES} bytes in one task")
                content = archive.extractfile(member)
                assert content is not None, "it is a regular file"
                target = directory / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("xb") as file:
                    shutil.copyfileobj(content, file)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{where}: task_binary cannot be unpacked: {error}") from error
    if not (directory / "task.toml").is_file():
        raise DataError(f"{where}: no task.toml in the archive, so it is not a Harbor task")
