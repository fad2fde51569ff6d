"""Generated tasks of Harbor's that a model of a few weights learns: the sums of `envs.arithmetic`, graded in a sandbox.

instruction   What is 3 + 4?
agent         one reply of the model's, as /app/reply.txt     child/treadle_small.py
verifier      1 for `<answer> 7</answer>`, else 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from treadle.core.files import cache_directory
from treadle.core.types import Task
from treadle.envs import arithmetic
from treadle.integrations.harbor.tasks import DRIVER

_TASK = """schema_version = "1.0"

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
    """Yield the first `count` tasks of a split, as `envs.arithmetic.tasks` does, each with a directory in the cache.

    Raises as that does.
    """
    for task in arithmetic.tasks(split, count, seed):
        a, b = task.extras["a"], task.extras["b"]
        directory = cache_directory() / "harbor" / "sums-2" / f"{a}-{b}"  # 2: of what `_write` writes
        if not directory.is_dir():
            _write(directory, task)
        name = task.task_id.replace("arithmetic", "sum", 1)
        yield replace(task, task_id=name, environment="", driver=DRIVER, extras={**task.extras, "path": str(directory)})


def _write(directory: Path, task: Task) -> None:
    """Write the task's directory, which is complete as soon as it is there; other runs may be writing the same one."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".", dir=directory.parent) as temporary:
        new = Path(temporary) / directory.name
        for name in ("environment", "tests"):
            (new / name).mkdir(parents=True)
        (new / "instruction.md").write_text(task.prompt[0]["content"])
        (new / "environment" / "Dockerfile").write_text("FROM debian:12\nWORKDIR /app\n")
        (new / "tests" / "test.sh").write_text(_TEST.format(answer=task.ground_truth))
        (new / "task.toml").write_text(_TASK)
        try:
            new.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
