"""Everything that can fail does, in one run, in virtual time."""

import asyncio
import errno
import multiprocessing
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from tests.runs import query, resume, start, updates
from tests.worlds import END, Quiet, hang, tool, vowel_tasks
from treadle.core.engine import Completion
from treadle.core.errors import Cause, CheckpointError, EngineError, TrajectoryFailure
from treadle.core.types import Ids, Message, SamplingParams, Task
from treadle.envs.base import Environment, EnvStep
from treadle.loop.runtime import Runtime
from treadle.plan.inputs import make_inputs
from treadle.rollout.attempt import Players
from treadle.testing import FakeEngine, VirtualLoop

UPDATES, TASKS, ATTEMPTS, STALENESS = 12, 3, 4, 2
OUTAGE = (60.0, 100.0)  # virtual seconds
SETTINGS = (
    f"orchestration.updates={UPDATES}",
    "orchestration.checkpoint_every=4",
    f"orchestration.max_staleness={STALENESS}",
    "failures.max_failed_fraction=1",  # an outage fails whatever is under way
    f"training.tasks_per_update={TASKS}",
    f"training.group_size={ATTEMPTS}",
    "rollout.environment_timeout=30",
    "failures.causes.engine.retries=3",
    "failures.causes.engine.backoff=10",
)


def chance(*what: object) -> float:
    """In [0, 1), the same for the same."""
    return crc32(repr(what).encode()) / 2**32


class Unreliable(Environment):
    """Two replies; a step raises in 10% of cases and hangs in 3%; one task cannot be graded."""

    opened = closed = 0

    async def reset(self, task: Task) -> Sequence[Message]:
        type(self).opened += 1
        self.task, self.replies = task, 0
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        self.replies += 1
        await asyncio.sleep(1 + chance("pause", text))
        fate = chance("fate", text)
        if fate < 0.1:
            raise LookupError("the page is gone")
        if fate < 0.13:
            await hang()
        if self.replies < 2:
            return EnvStep([tool("more")])
        if self.task.task_id == "train-0":
            raise TrajectoryFailure(Cause.VERIFIER, "the grader does not know this task")
        return EnvStep(reward=chance("reward", text), done=True)

    async def close(self) -> None:
        type(self).closed += 1


class Flaky(FakeEngine):
    """Tokens and seconds are functions of the call's seed. 2% of calls fail; for a while every call does."""

    def __init__(self) -> None:
        super().__init__(self._tokens)
        self.left: set[asyncio.Task[Any]] = set()

    def _tokens(self, prompt: Ids, sampling: SamplingParams) -> list[int]:
        drawn = np.random.default_rng(sampling.seed).integers(200, 700, 4)
        return [*map(int, drawn), END]

    async def generate(self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, **more: Any) -> Completion:
        if chance("engine", sampling.seed) < 0.02:
            raise EngineError("out of memory")
        self._require_alive()
        await asyncio.sleep(5 * chance("seconds", sampling.seed))
        self._require_alive()
        return await super().generate(prompt_ids, sampling, session=session, **more)

    def _require_alive(self) -> None:
        if OUTAGE[0] <= asyncio.get_running_loop().time() < OUTAGE[1]:
            raise EngineError("connection refused")

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.left = asyncio.all_tasks() - {asyncio.current_task()}


def flaky_runtime(made: list[Flaky]) -> Runtime:
    """Runs sample from these, in virtual time."""

    async def open_engine(*_: Any) -> tuple[Flaky, Flaky]:
        made.append(Flaky())
        return made[-1], made[-1]

    async def unchecked(*_: Any) -> None:
        """A fake engine has logprobs of its own."""

    return Runtime(open_engine=open_engine, check_engine=unchecked, new_event_loop=VirtualLoop)


class Filling(Quiet):
    """The disk is full once a certain update is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, update: int) -> None:
        super().__init__()
        self.monkeypatch, self.last = monkeypatch, update

    def update(self, row: Any) -> None:
        def full(path: Path, content: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        super().update(row)
        if row["update"] == self.last:
            self.monkeypatch.setattr("treadle.core.files.write_durably", full)


def test_a_run_in_which_everything_fails_trains_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Flaky] = []
    runtime = flaky_runtime(engines)
    path, threads = tmp_path / "run", threading.active_count()
    tasks = [replace(task, environment="world") for task in vowel_tasks("train", 8)]
    inputs = make_inputs(tasks, [], Players({"world": Unreliable}))
    with monkeypatch.context() as disk:
        progress = Filling(disk, update=8)
        with pytest.raises(CheckpointError, match="No space left on device"):
            start(path, *SETTINGS, inputs=inputs, progress=progress, runtime=runtime)
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["step-000000", "step-000004"]
    summary = resume(path, inputs=inputs, runtime=runtime)

    # it ended, having trained
    assert (summary["updates"], summary["stopped_early"]) == (UPDATES, False)
    rows = updates(path)
    assert [row["update"] for row in rows] == list(range(1, UPDATES + 1))
    assert all(row["trainable_tokens"] > 0 and row["gradient_norm"] > 0 for row in rows)
    assert max(row["trained_staleness_max"] for row in rows) <= STALENESS
    assert any("task train-0 is left out" in line for line in progress.lines)

    # nothing is left behind
    for engine in engines:
        assert (engine.left, engine.open, engine.running) == (set(), [], 0)
    assert len(engines) == 2 and Unreliable.opened == Unreliable.closed > 0
    assert threading.active_count() == threads and not multiprocessing.active_children()

    check_causes(path)
    check_survivors(path)


def check_causes(path: Path) -> None:
    """Every failed attempt has its cause, no reward, no advantage and no trained step."""
    failed = query(
        path,
        "SELECT t.*, g.task, (SELECT count(*) FROM steps s WHERE s.trajectory_id = t.trajectory_id AND state != "
        "'dropped') AS kept FROM trajectories t JOIN groups g USING (group_id) WHERE failure_cause IS NOT NULL",
    )
    assert all((row["reward"], row["advantage"], row["kept"]) == (None, None, 0) for row in failed)
    messages = Counter((row["failure_cause"], row["failure_message"]) for row in failed)
    assert messages.keys() == {
        ("environment", "step raised LookupError: the page is gone"),
        ("timeout", "step took longer than 30 s"),
        ("engine", "out of memory"),
        ("engine", "connection refused"),
        ("verifier", "the grader does not know this task"),
    }
    assert min(messages.values()) >= 5


def check_survivors(path: Path) -> None:
    """A group's other attempts train, each with its advantage over those of them that have a reward."""
    rows = query(
        path,
        "SELECT t.*, (SELECT count(*) FROM steps s WHERE s.trajectory_id = t.trajectory_id AND state = 'trained') AS "
        "trained FROM trajectories t",
    )
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    trained = [own for own in groups.values() if any(row["trained"] for row in own)]
    assert len(trained) == UPDATES * TASKS
    for own in trained:
        graded = [row for row in own if row["reward"] is not None]
        rewards = np.array([row["reward"] for row in graded])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for row, advantage in zip(graded, expected, strict=True):
            assert row["advantage"] is None or row["advantage"] == pytest.approx(advantage, abs=1e-9)
            assert (row["advantage"] is not None) == (row["trained"] > 0)
    mixed = [own for own in trained if any(row["failure_cause"] for row in own)]
    again = [row for own in trained for row in own if row["attempt"] >= ATTEMPTS and row["trained"]]
    assert mixed and again
