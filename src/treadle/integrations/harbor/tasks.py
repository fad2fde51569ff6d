"""Tasks of Harbor's as tasks of a run: a directory each, with `task.toml`, instruction, environment and tests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle.core.config import build
from treadle.core.errors import ConfigError, DataError, TrajectoryFailure
from treadle.core.files import cache_directory
from treadle.core.types import Message, Task
from treadle.integrations.harbor.config import harbor_program
from treadle.integrations.harbor.packed import unpack
from treadle.integrations.worker import WorkerConfig, WorkerPool, WorkerProgram

DRIVER = "harbor"
"""The name under which the driver that plays these tasks is registered."""

SOURCE = "harbor_tasks"
"""The name under which the generator of these tasks is registered."""

_TASK = "task.toml"


def harbor_tasks(
    split: str,
    path: str,
    registry: str | None = None,
    python: str | None = None,
    worker: Mapping[str, Any] | None = None,
) -> Iterator[Task]:
    """Yield the tasks below a directory, in order of their paths, those packed into a Parquet file, or a data set's.

        Task("git/undo", prompt=({"role": "user", "content": "Undo the last commit ..."},), driver="harbor",
             extras={"path": "/data/tasks/git/undo"})

    path: of either, or `NAME@VERSION` of a data set, which Harbor downloads, in the registry's file if one is named.
    python, worker: as of `HarborConfig`. The prompt is for people: the agent makes its own of the instruction.

    Raises ConfigError for what is not there, DataError for packed tasks that are none.
    """
    if "@" in path and not Path(path).exists():
        for task in _downloaded(path, registry, harbor_program(python), build(WorkerConfig, worker or {})):
            yield Task(task.name, _instruction(task), driver=DRIVER, extras={"path": str(task)})
        return
    root = _unpacked(Path(path)) if path.endswith(".parquet") else Path(path)
    if not root.is_dir():
        raise ConfigError(f"data.{split}: {path!r} is not a directory (it is relative to {Path.cwd()})")
    tasks = [root] if (root / _TASK).is_file() else sorted(file.parent for file in root.rglob(_TASK))
    if not tasks:
        raise ConfigError(f"data.{split}: no tasks below {path!r}: a task is a directory with a {_TASK}")
    for task in tasks:
        name = task.resolve().name if task == root else task.relative_to(root).as_posix()
        yield Task(name, _instruction(task), driver=DRIVER, extras={"path": str(task)})


def _instruction(task: Path) -> tuple[Message, ...]:
    """Return the instruction as a message; none of a task whose steps have one each."""
    try:
        text = (task / "instruction.md").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    except UnicodeDecodeError as error:
        raise DataError(f"{task}/instruction.md is not UTF-8: {error}") from error
    return (Message(role="user", content=text),) if text.strip() else ()


def _downloaded(data_set: str, registry: str | None, program: WorkerProgram, worker: WorkerConfig) -> list[Path]:
    """Return the directories of a data set's tasks, in order of their paths. Raises ConfigError."""
    order = {"data_set": data_set, "registry": registry and str(Path(registry).absolute())}
    try:
        answer = asyncio.run(_asked({"tasks": order}, program, worker))
    except TrajectoryFailure as failure:
        raise ConfigError(f"Harbor cannot download {data_set!r}: {failure.message}") from failure
    return [Path(task) for task in answer["tasks"]]


async def _asked(payload: Mapping[str, Any], program: WorkerProgram, worker: WorkerConfig) -> dict[str, Any]:
    async with WorkerPool(program, worker.model_copy(update={"processes": 1})) as pool:
        return await pool.call(payload)


def _unpacked(parquet: Path) -> Path:
    """Return where the file's tasks are, unpacked once: a directory of the cache, by the file's digest."""
    if not parquet.is_file():
        raise ConfigError(f"no file {str(parquet)!r} (it is relative to {Path.cwd()})")
    with parquet.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    directory = cache_directory() / "harbor" / digest[:32]
    if not directory.is_dir():
        unpack(parquet, directory)
    return directory
