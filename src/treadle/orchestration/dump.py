"""Trajectories as JSON lines, with their texts: for reading, and for other tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from treadle.core.errors import ConfigError, RunError
from treadle.core.files import check_writable, write_atomically
from treadle.core.outcomes import as_played
from treadle.core.types import Group, Ids, Step, Trajectory


def check_dump(path: Path) -> None:
    """Raise ConfigError if `write_dump` could not write this file."""
    if path.is_dir():
        raise ConfigError(f"--dump: {str(path)!r} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--dump: {str(path.parent)!r} is not a directory; create it first")
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"--dump: {str(path)!r} is not a regular file, and would be replaced; choose another")
        check_writable(path)
    except OSError as error:
        raise ConfigError(f"--dump: cannot write {str(path)!r}: {error.strerror}; name another file") from error


def write_dump(path: Path, groups: Sequence[Group], decode: Callable[[Ids], str]) -> None:
    """Write the trajectories to a file, one a line. Complete or absent. Raises RunError where the disk refuses."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in dump_records(groups, decode)]
    try:
        write_atomically(path, "".join(lines).encode())
    except OSError as error:
        raise RunError(f"could not write {path}: {error}; choose another file or free disk space") from error


def dump_records(groups: Sequence[Group], decode: Callable[[Ids], str]) -> Iterator[dict[str, Any]]:
    """Yield what `write_dump` writes of each trajectory, in order of tasks and attempts."""
    for group in groups:
        for trajectory in group.trajectories:
            yield _trajectory(group, trajectory, decode)


def _trajectory(group: Group, t: Trajectory, decode: Callable[[Ids], str]) -> dict[str, Any]:
    return {
        "task_id": t.task_id,
        "trajectory_id": t.trajectory_id,
        "attempt": t.attempt,
        "extras": group.task.extras,
        "reward": t.reward,
        "components": as_played(t).components,
        "status": str(t.status),
        "failure": f"{t.failure.cause}: {t.failure.message}" if t.failure else None,
        "traceback": t.failure.traceback if t.failure else None,
        "seconds": t.seconds,
        "steps": [_step(step, decode) for step in t.steps],
    }


def _step(step: Step, decode: Callable[[Ids], str]) -> dict[str, Any]:
    return {
        "prompt": decode(step.prompt_ids),
        "completion": decode(step.completion_ids),
        "prompt_ids": step.prompt_ids.tolist(),
        "completion_ids": step.completion_ids.tolist(),
        "logprobs": step.logprobs.tolist(),
        "stop_reason": str(step.stop_reason),
        "reward": step.reward,
    }
