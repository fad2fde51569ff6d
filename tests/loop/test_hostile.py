"""Whole runs with user code that does its worst: the run ends as it should, and says who did what."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import Summary, check_finished, query, resume, start, updates
from tests.worlds import Quiet, Vowels, user, vowel_tasks
from treadle.core.errors import Cause, RunError, TrajectoryFailure
from treadle.core.types import Message, Task
from treadle.envs.base import EnvStep
from treadle.loop.runtime import Runtime
from treadle.plan.inputs import Inputs, make_inputs
from treadle.rollout.attempt import Players
from treadle.testing import VirtualLoop

pytestmark = pytest.mark.xdist_group("orchestration_hostile")  # what its tests share is made once

OPTIONS = ("failures.max_failed_fraction=1", "failures.task_limit=1000")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """The tiny recipe with its own environment."""
    path = tmp_path_factory.mktemp("runs") / "reference"
    return path, start(path)


def playing(world: type[Vowels]) -> Inputs:
    train, held_out = (
        [replace(task, environment="world") for task in vowel_tasks(split, count)]
        for split, count in (("train", 6), ("held_out", 3))
    )
    return make_inputs(train, held_out, Players({"world": world}))


def acting(act: Callable[[], Any]) -> type[Vowels]:
    """`Vowels` that does something in every other of one task's last steps."""

    class Acting(Vowels):
        acted = 0

        async def step(self, text: str) -> EnvStep:
            answer = await super().step(text)
            if self.task.task_id == "train-1" and answer.done:
                Acting.acted += 1
                if Acting.acted % 2:
                    found = act()
                    return answer._replace(**await found if asyncio.iscoroutine(found) else found)
            return answer

    return Acting


# What it raises, returns and does to the event loop


async def exits_in_a_task() -> Any:
    async def exiting() -> None:
        raise SystemExit("bye")

    await asyncio.create_task(exiting())


def with_a_surrogate() -> Any:
    raise TrajectoryFailure(Cause.VERIFIER, "no \ud800 tests")


def of_no_cause() -> Any:
    failure = TrajectoryFailure(Cause.VERIFIER, "no tests")
    failure.cause = "nobody"  # type: ignore[assignment]
    raise failure


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("act", "cause", "message"),
    [
        (exits_in_a_task, "environment", "step tried to exit the process (bye)"),
        (with_a_surrogate, "verifier", "no \\ud800 tests"),
        (of_no_cause, "environment", "step raised TrajectoryFailure: nobody: no tests"),
        (lambda: {"reward": 1e308}, "environment", "step gave the reward 1e+308, a float, in "),
        (lambda: {"reward": -1e308}, "environment", "step gave the reward -1e+308, a float, in "),
    ],
)
def test_an_attempt_that_does_its_worst_is_a_failed_one(
    act: Callable[[], Any], cause: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    start(path, *OPTIONS, inputs=playing(acting(act)))
    check_finished(path)
    failed = query(path, "SELECT * FROM trajectories WHERE failure_cause IS NOT NULL")
    assert {(row["failure_cause"], row["failure_message"][: len(message)]) for row in failed} == {(cause, message)}
    assert sum(row["failed"] for row in updates(path)) > 0
    if cause != "environment" or "raised" in message or "exit" in message:
        assert all("test_hostile.py" in row["failure_traceback"] for row in failed)


def test_a_run_whose_event_loop_is_stopped_ends_resumably(tmp_path: Path, reference: tuple[Path, Summary]) -> None:
    def stop() -> Any:
        asyncio.get_running_loop().stop()
        return {}

    path = tmp_path / "run"
    with pytest.raises(RunError, match="an environment, agent or callback stopped the event loop"):
        start(path, inputs=playing(acting(stop)))
    summary = resume(path, inputs=playing(Vowels))
    check_finished(path)
    assert summary["weights_sha256"] == reference[1]["weights_sha256"]


def test_an_environment_that_swallows_its_cancellation_does_not_keep_the_run_from_ending(tmp_path: Path) -> None:
    async def resist() -> Any:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    path, progress, runtime = tmp_path / "run", Quiet(), Runtime(new_event_loop=VirtualLoop)
    start(path, *OPTIONS, inputs=playing(acting(resist)), progress=progress, runtime=runtime)
    check_finished(path)
    [line] = [line for line in progress.lines if "does not end" in line]
    assert "is left behind: environment 'world' (task train-1, trajectory g0" in line
    failed = query(path, "SELECT * FROM trajectories WHERE failure_cause = 'timeout'")
    assert failed and all("in resist" in row["failure_traceback"] for row in failed)


def test_an_environment_that_blocks_is_named_and_counted(tmp_path: Path) -> None:
    def block() -> Any:
        time.sleep(1.3)
        return {}

    path, progress = tmp_path / "run", Quiet()
    start(path, "orchestration.updates=3", inputs=playing(acting(block)), progress=progress)
    [line] = [line for line in progress.lines if "blocks the event loop" in line and "in block" in line]
    assert line.startswith("environment 'world' blocks the event loop, at ")
    blocked = query(path, "SELECT * FROM trajectories WHERE blocked_seconds > 0")
    assert any(row["blocked_seconds"] >= 1.3 for row in blocked)
    counted = sum(row["blocked_seconds"] for row in updates(path))
    assert counted == pytest.approx(sum(row["blocked_seconds"] for row in blocked))


# Tasks


class Vandal(Vowels):
    """Changes its task."""

    async def reset(self, task: Task) -> Sequence[Message]:
        opening = [user(task.prompt[0]["content"])]
        task.prompt[0]["content"] += " again"
        task.extras["spoilt"] = True  # type: ignore[index]
        self.task, self.replies = task, 0
        return opening


def test_a_task_that_is_changed_in_one_attempt_is_whole_in_every_other(
    tmp_path: Path, reference: tuple[Path, Summary]
) -> None:
    summary = start(tmp_path / "run", inputs=playing(Vandal))
    assert summary["weights_sha256"] == reference[1]["weights_sha256"]
    [row] = query(
        tmp_path / "run", "SELECT count(*) AS n FROM groups WHERE task LIKE '%again%' OR task LIKE '%spoilt%'"
    )
    assert row["n"] == 0


# Plain methods


class PlainVowels(Vowels):
    """The same without async, and with pauses of any length."""

    def reset(self, task: Task) -> Sequence[Message]:  # type: ignore[override]
        time.sleep(random.random() * 0.02)
        self.task, self.replies = task, 0
        return task.prompt

    def step(self, text: str) -> EnvStep:  # type: ignore[override]
        time.sleep(random.random() * 0.05)
        return asyncio.run(super().step(text))  # it may: there is no event loop on this thread


@pytest.mark.quick(1)
@pytest.mark.parametrize("option", ["engine.own_process=false", "engine.own_process=true"])
def test_plain_methods_train_the_same_weights(option: str, tmp_path: Path, reference: tuple[Path, Summary]) -> None:
    """In synchronous training no bit depends on the order in which threads get their turns."""
    summary = start(tmp_path / "run", option, inputs=playing(PlainVowels))
    assert summary["weights_sha256"] == reference[1]["weights_sha256"]


class Passing(VirtualLoop):
    """Time stands still for threads that compute, but not for one that is stuck, whose call is cancelled later."""

    def stuck(self) -> None:
        super()._done(None)

    def _done(self, call: object) -> None:
        assert isinstance(call, asyncio.Future)
        if not call.cancelled():
            super()._done(call)


def test_a_thread_that_never_returns_is_counted_named_and_holds_up_nobody(tmp_path: Path) -> None:
    over, loop = threading.Event(), Passing()

    class Stuck(PlainVowels):
        waited = False

        def step(self, text: str) -> EnvStep:  # type: ignore[override]
            if self.task.task_id == "train-1" and not Stuck.waited:
                Stuck.waited = True
                loop.call_soon_threadsafe(loop.stuck)
                over.wait()
            return super().step(text)

    path, progress, runtime = tmp_path / "run", Quiet(), Runtime(new_event_loop=lambda: loop)
    try:
        start(path, *OPTIONS, inputs=playing(Stuck), progress=progress, runtime=runtime)
    finally:
        over.set()
    check_finished(path)
    assert updates(path)[-1]["abandoned_threads"] == 1
    [line] = [line for line in progress.lines if "its thread is left behind" in line]
    assert "environment 'world' (task train-1, trajectory g" in line
    [failed] = query(path, "SELECT * FROM trajectories WHERE failure_cause = 'timeout'")
    assert "test_hostile.py:" in failed["failure_traceback"] and "in step" in failed["failure_traceback"]


# Whose fault it is


@pytest.mark.quick(2)
@pytest.mark.parametrize("cause", [Cause.ENGINE, Cause.INFRASTRUCTURE, Cause.ENVIRONMENT, Cause.TIMEOUT])
def test_no_task_is_left_out_for_what_engine_or_infrastructure_fail(cause: Cause, tmp_path: Path) -> None:
    """The first group of one task fails as a whole, and no failure is made again."""

    class Failing(Vowels):
        failed = 0

        async def step(self, text: str) -> EnvStep:
            if self.task.task_id == "train-1" and Failing.failed < 3:
                Failing.failed += 1
                raise TrajectoryFailure(cause, "gone")
            return await super().step(text)

    path, progress = tmp_path / "run", Quiet()
    once = "failures.causes={engine: {retries: 0}, infrastructure: {retries: 0}}"
    options = (*OPTIONS[:1], "failures.task_limit=1", once)
    start(path, *options, "orchestration.updates=6", inputs=playing(Failing), progress=progress)
    check_finished(path)
    blamed = cause not in (Cause.ENGINE, Cause.INFRASTRUCTURE)
    assert any("task train-1 is left out" in line for line in progress.lines) == blamed
    trained = "SELECT * FROM groups WHERE trained_version IS NOT NULL AND json_extract(task, '$.task_id') = 'train-1'"
    assert bool(query(path, trained)) != blamed
