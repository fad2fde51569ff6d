"""Harbor's tasks as tasks of a run: one directory each, with `task.toml`, instruction, environment and tests.

They come from a directory, a data set downloaded by Harbor, or a Parquet file of packed tasks, as published for Harbor
(CodeContests, for example):

    path: "code_contests-0001"   task_binary: a tar archive of the task's directory, compressed or not

Archives are untrusted: they cannot write outside their task's directory, nor links or devices, nor more than
`MOST_FILES` files and `MOST_BYTES` bytes per task.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from treadle.core.errors import ConfigError, DataError, TrajectoryFailure
from treadle.core.files import cache_directory
from treadle.core.registry import how_to_install
from treadle.core.text import escape_text
from treadle.core.types import Message, Task
from treadle.envs import arithmetic
from treadle.integrations.harbor.config import harbor_program
from treadle.workers.foreign import call_once

MOST_FILES = 10_000
MOST_BYTES = 2**30

_COLUMNS = ("path", "task_binary")
_TASK = "task.toml"


def harbor_tasks(
    split: str,
    path: str,
    registry: str | None = None,
    python: str | None = None,
    worker: Mapping[str, Any] | None = None,
) -> Iterator[Task]:
    """Yield the tasks below a directory, in order of their paths, or from a Parquet file or a data set.

        Task("git/undo", prompt=({"role": "user", "content": "Undo the last commit ..."},), driver="harbor",
             extras={"path": "/data/tasks/git/undo"})

    path: path of either, or `NAME@VERSION` of a data set that Harbor downloads, from the registry file if given.
    python, worker: as in `HarborConfig`. The prompt is for readers: the agent makes its own from the instruction.

    Raises ConfigError for a missing path, DataError for invalid packed tasks.
    """
    if "@" in path and not Path(path).exists():
        order = {"data_set": path, "registry": registry and str(Path(registry).absolute())}
        try:
            answer = asyncio.run(call_once(harbor_program(python), worker, {"tasks": order}))
        except TrajectoryFailure as failure:
            raise ConfigError(f"Harbor cannot download {path!r}: {failure.message}") from failure
        yield from (_harbor_task(Path(task).name, Path(task)) for task in answer["tasks"])
        return
    root = _unpacked(Path(path)) if path.endswith(".parquet") else Path(path)
    if not root.is_dir():
        raise ConfigError(f"data.{split}: {path!r} is not a directory (it is relative to {Path.cwd()})")
    tasks = [root] if (root / _TASK).is_file() else sorted(file.parent for file in root.rglob(_TASK))
    if not tasks:
        raise ConfigError(f"data.{split}: no tasks below {path!r}: a task is a directory with a {_TASK}")
    for task in tasks:
        yield _harbor_task(task.resolve().name if task == root else task.relative_to(root).as_posix(), task)


def _harbor_task(name: str, directory: Path) -> Task:
    """Return a task with its instruction as a message; without one if each step has its own."""
    try:
        text = (directory / "instruction.md").read_text(encoding="utf-8")
    except FileNotFoundError:
        text = ""
    except UnicodeDecodeError as error:
        raise DataError(f"{directory}/instruction.md is not UTF-8: {error}") from error
    prompt = (Message(role="user", content=text),) if text.strip() else ()
    return Task(name, prompt, driver="harbor", extras={"path": str(directory)})


def _unpacked(parquet: Path) -> Path:
    """Return the directory of the file's tasks, unpacked once into the cache, by the file's digest."""
    if not parquet.is_file():
        raise ConfigError(f"no file {str(parquet)!r} (it is relative to {Path.cwd()})")
    with parquet.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    directory = cache_directory() / "harbor" / digest[:32]
    if not directory.is_dir():
        unpack(parquet, directory)
    return directory


def unpack(parquet: Path, directory: Path) -> int:
    """Write each packed task into its own directory below `directory`, which appears complete or not at all.

    Returns their number. Raises ConfigError for an unreadable file or a directory that is not empty, DataError for an
    invalid row, or one that would write elsewhere.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{str(directory)!r} already exists; name a new directory, or remove it")
    directory.absolute().parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.absolute().parent))
    try:
        names: set[Path] = set()
        for number, row in enumerate(_packed_rows(parquet)):
            where = f"{parquet}: row {number}"
            name, packed = _inside(row["path"], where), row["task_binary"]
            if name in names:
                raise DataError(f"{where}: the path {str(name)!r} occurs twice")
            if not isinstance(packed, bytes):
                raise DataError(f"{where}: task_binary is {packed!r:.40}; it must be a tar archive, as bytes")
            names.add(name)
            _unpack_task(packed, made / name, where)
        if not names:
            raise DataError(f"{parquet} has no rows")
        if directory.exists():
            directory.rmdir()
        made.chmod(0o755)
        made.rename(directory)
        return len(names)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _packed_rows(parquet: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise ConfigError(f"{parquet} needs pyarrow; {how_to_install('pyarrow')}") from error
    try:
        table = pq.ParquetFile(parquet)
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{str(parquet)!r} cannot be read as a Parquet file: {error}") from error
    if missing := [name for name in _COLUMNS if name not in table.schema_arrow.names]:
        have = ", ".join(table.schema_arrow.names)
        raise ConfigError(
            f"{parquet} has no column {missing[0]!r}, only {have}; packed tasks have {' and '.join(_COLUMNS)}"
        )
    for batch in table.iter_batches(batch_size=64, columns=list(_COLUMNS)):
        yield from batch.to_pylist()


def _inside(path: Any, where: str) -> Path:
    """Return a relative path that stays inside. Raises DataError for all others."""
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


_SUM_TASK = """schema_version = "1.0"

[verifier]
timeout_sec = 30.0

[agent]
timeout_sec = 120.0

[environment]
build_timeout_sec = 60.0
"""
_TEST = """#!/bin/bash
[ "$(cat /app/reply.txt)" = "<answer> {answer}</answer>" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""


def harbor_sums(split: str, count: int, seed: int = 0) -> Iterator[Task]:
    """Yield tasks that a tiny model can learn: the sums of `envs.arithmetic.tasks`, graded in a sandbox.

    instruction   What is 3 + 4?
    agent         one reply of the model, as /app/reply.txt       child/treadle_small.py
    verifier      1 for `<answer> 7</answer>`, otherwise 0
    """
    for task in arithmetic.tasks(split, count, seed):
        a, b = task.extras["a"], task.extras["b"]
        # 2: version of the files written by `_write`.
        directory = cache_directory() / "harbor" / "sums-2" / f"{a}-{b}"
        if not directory.is_dir():
            _write(directory, task)
        name = task.task_id.replace("arithmetic", "sum", 1)
        yield replace(
            task, task_id=name, environment="", driver="harbor", extras={**task.extras, "path": str(directory)}
        )


def _write(directory: Path, task: Task) -> None:
    """Write the task's directory, complete or absent; other runs may be writing the same one."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=directory.parent) as temporary:
        new = Path(temporary) / directory.name
        for name in ("environment", "tests"):
            (new / name).mkdir(parents=True)
        (new / "instruction.md").write_text(task.prompt[0]["content"])
        (new / "environment" / "Dockerfile").write_text("FROM debian:12\nWORKDIR /app\n")
        (new / "tests" / "test.sh").write_text(_TEST.format(answer=task.ground_truth))
        (new / "task.toml").write_text(_SUM_TASK)
        try:
            new.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
