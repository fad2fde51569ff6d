"""Real trials of Harbor's: tasks that tests write, a scripted model that plays them, and what became of them."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from tests.integrations.libraries import library_python, play_by
from tests.worlds import END, PLAIN
from treadle.core.config import build
from treadle.core.engine import Completion, Engine
from treadle.core.errors import ConfigError
from treadle.core.types import Group, Ids, SamplingParams, Task, Trajectory
from treadle.integrations.harbor.config import HarborConfig
from treadle.integrations.harbor.driver import HarborDriver, check_programs
from treadle.packing.flat import calls, flatten
from treadle.packing.layout import Packing, arrange, micro_batches
from treadle.testing import FakeEngine

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SHIPPED = Path(str(files("treadle.recipes") / "harbor_tasks"))
MARK = os.environ.setdefault("LC_TREADLE_TESTS", uuid4().hex)  # LC_*: workers and their sandboxes inherit it
GREETING = "echo 'Hello, world!' > /app/hello.txt\n"
LIMITS = "[verifier]\ntimeout_sec = 900.0\n[agent]\ntimeout_sec = 900.0\n[environment]\nbuild_timeout_sec = 900.0\n"
OK = "[ -f /app/hello.txt ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"


def python_with_harbor() -> str:
    """The interpreter that has Harbor, on a machine with local sandboxes; tests are skipped without.

    In continuous integration they fail, unless there is no Python to make one with.
    """
    python = library_python("TREADLE_HARBOR_VENV", ".venv-harbor")
    try:
        check_programs(HarborConfig(environment="local"))
    except ConfigError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
    return python


def processes() -> str:
    """All processes of this machine, one a line: number and command line."""
    return subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout


def worker_of(run: int) -> int:
    """The worker process that this process has started, itself or through others."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}

    def is_below(pid: int) -> bool:
        return pid == run or (pid in parents and is_below(parents[pid]))

    return next(int(pid) for pid, _, command in rows if "foreign_child.py" in command and is_below(int(pid)))


def sandboxes() -> list[str]:
    """Those that are local sandboxes of these tests; others may run on this machine at the same time."""
    return [
        line for line in processes().splitlines() if "bwrap --die-with-parent" in line and is_marked(line.split()[0])
    ]


def is_marked(pid: str) -> bool:
    """Whether the process, or one that started it, was started by these tests."""
    try:
        return MARK.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return True
    except OSError:  # it has ended
        return False


def write_task(
    directory: Path, instruction: str = "Say ok.", test: str = OK, settings: str = LIMITS, steps: Sequence[str] = ()
) -> Task:
    """A task on disk. steps: instructions of a task of several steps, each verified by the same test."""
    directory.mkdir(parents=True)
    named = "".join(f'[[steps]]\nname = "{number}"\n' for number, _ in enumerate(steps))
    (directory / "task.toml").write_text(f'schema_version = "1.0"\n{settings}{named}')
    (directory / "environment").mkdir()
    (directory / "environment" / "Dockerfile").write_text("FROM debian:12\n")
    for place, text in (
        [(directory, instruction)]
        if not steps
        else [(directory / "steps" / str(number), text) for number, text in enumerate(steps)]
    ):
        (place / "tests").mkdir(parents=True)
        (place / "instruction.md").write_text(text)
        (place / "tests" / "test.sh").write_text(f"#!/bin/bash\n{test}\n")
    return Task(directory.name, driver="harbor", extras={"path": str(directory)})


def shipped(name: str) -> Task:
    return Task(name, driver="harbor", extras={"path": str(SHIPPED / name)})


def answer(*commands: str, done: bool = False) -> str:
    """What Terminus-2 reads: keystrokes, and whether the task is done (which it asks twice for)."""
    keys = [{"keystrokes": command, "duration": 0.1} for command in commands]
    return json.dumps({"analysis": "a", "plan": "p", "commands": keys, "task_complete": done})


WELL = (answer(GREETING), answer("cat /app/hello.txt\n", done=True), answer(done=True))


def turn(text: str) -> int:
    """The number of replies in the prompt."""
    return text.count("<|im_start|>assistant") - 1


Reply = TypeVar("Reply", str, str | Exception)


def playing(*replies: Reply) -> Callable[[str], Reply]:
    """Play the replies turn by turn, and the last one from then on."""
    return lambda text: replies[min(turn(text), len(replies) - 1)]


def scripted(reply: Callable[[str], str | Exception], **options: Any) -> FakeEngine:
    """An engine that answers the text of each prompt; an exception is raised."""

    def ids(prompt: Ids, sampling: SamplingParams) -> list[int]:
        said = reply(str(PLAIN.decode(prompt.tolist())))
        if isinstance(said, Exception):
            raise said
        return list(_said(said))

    return FakeEngine(ids, **options)


@cache  # no part of what a benchmark measures
def _said(text: str) -> tuple[int, ...]:
    return (*PLAIN.encode(text, add_special_tokens=False), END)


class Sampled:
    """Wraps an engine and notes what it sampled, by session: what the record must hold."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.calls: dict[str, list[tuple[list[int], list[int]]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        found = await self._engine.generate(prompt_ids, sampling, session=session, **more)
        self.calls.setdefault(session, []).append((prompt_ids.tolist(), found.token_ids.tolist()))
        return found

    def recorded(self, trajectory: Trajectory) -> bool:
        """Whether the trajectory's steps are the calls of its session, with their very ids, in order."""
        steps = [(step.prompt_ids.tolist(), step.completion_ids.tolist()) for step in trajectory.steps]
        return steps == self.calls.get(trajectory.trajectory_id, [])


def check_trained_once(trajectory: Trajectory) -> None:
    """Pack the trajectory as a tree: each sampled token is trained, once, and what calls share is there once."""
    batch = flatten([Group("g", 0, 0, 0, Task("t"), (trajectory,))])
    assert [step.completion_ids.tolist() for step in batch.steps] == [
        s.completion_ids.tolist() for s in trajectory.steps
    ]
    assert batch.mask.all() and len(batch.mask) == sum(len(step.completion_ids) for step in trajectory.steps)
    [tree] = micro_batches(arrange(calls(batch), Packing.TREE), 10**9)
    assert sorted(tree.flat.tolist()) == list(range(len(batch.mask)))
    assert len(tree) < sum(len(step.prompt_ids) + len(step.completion_ids) for step in trajectory.steps)


def harbor(directory: Path, **settings: Any) -> HarborConfig:
    """Agents and environments of this folder's modules can be named."""
    where = {
        "environment": "local",
        "python": python_with_harbor(),
        "directory": str(directory),
        "worker": {"environment": {"PYTHONPATH": str(HERE)}},
    }
    trial = {"agent": {"kwargs": {"enable_summarize": False}}}
    return build(HarborConfig, {**where, "trials_per_second": 50.0, "trial": trial, **settings})


async def play(
    engine: Any, tasks: Sequence[Task], config: HarborConfig, check: bool = False, **rollout: Any
) -> list[Trajectory]:
    """An attempt at each task, all at once."""
    limits = {"max_steps": 30, "max_input_tokens": 60_000, "max_completion_tokens": 4000, **rollout}
    return await play_by("harbor", lambda setup: HarborDriver(setup, config), engine, tasks, check, **limits)
