"""Every failure of the outcome table, provoked in real trials: the stated policy, and siblings that are played on."""

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.harbor.trials import (
    GREETING,
    WELL,
    Sampled,
    answer,
    harbor,
    play,
    playing,
    sandboxes,
    scripted,
    turn,
    write_task,
)
from tests.integrations.libraries import KeptWorkers
from treadle.core.errors import Cause, ConfigError, EngineError, TrajectoryFailure
from treadle.core.types import Trajectory
from treadle.integrations.harbor.driver import run_names, trial_name
from treadle.workers.foreign import WorkerPool


def outcome(trajectory: Trajectory) -> str:
    """`done 1`, `max_steps 0`, or the cause of the failure."""
    return str(trajectory.failure.cause) if trajectory.failure else f"{trajectory.status} {trajectory.reward:g}"


def test_what_verifiers_and_models_do_wrong_ends_one_trial_each(kept: KeptWorkers, tmp_path: Path) -> None:
    """All in one run: each ends by its own row, and the one in which nothing is wrong is not touched."""
    reward = "echo {} > /logs/verifier/reward.txt".format
    tasks = {
        "well": write_task(tmp_path / "well"),
        "no_reward": write_task(tmp_path / "no_reward", test="exit 1"),
        "empty": write_task(tmp_path / "empty", test="touch /logs/verifier/reward.txt"),
        "nan": write_task(tmp_path / "nan", test=reward("NaN")),
        "words": write_task(tmp_path / "words", test=reward("good")),
        "slow_verifier": write_task(
            tmp_path / "slow_verifier",
            test="sleep 1000",
            settings="[verifier]\ntimeout_sec = 1.0\n[agent]\ntimeout_sec = 900.0\n[environment]\n",
        ),
        "other_key": write_task(tmp_path / "other_key", test="echo '{\"correct\": 1}' > /logs/verifier/reward.json"),
        "slow_agent": write_task(
            tmp_path / "slow_agent",
            "Say slow.",
            test=reward(1),
            settings="[verifier]\ntimeout_sec = 900.0\n[agent]\ntimeout_sec = 10.0\n[environment]\n",
        ),
        "context": write_task(tmp_path / "context", "Say context."),
        "engine": write_task(tmp_path / "engine", "Say engine."),
        "steps": write_task(tmp_path / "steps", "Say steps."),
        "no_tests": write_task(tmp_path / "no_tests"),
        "no_task": write_task(tmp_path / "no_task"),
    }
    shutil.rmtree(tmp_path / "no_tests" / "tests")
    (tmp_path / "no_task" / "task.toml").write_text("steps = 5")

    def reply(text: str) -> str | Exception:
        if "Say slow." in text:
            return '{"analysis": "", "plan": "", "commands": [{"keystrokes": "sleep 1000\\n", "duration": 60}]}'
        if "Say context." in text and turn(text) == 1:
            return answer("printf 'x%.0s' {1..6000}\n")
        if "Say engine." in text and turn(text) == 1:
            return EngineError("out of order")
        if "Say steps." in text:
            return answer(GREETING)
        return playing(*WELL)(text)

    began = time.monotonic()
    engine = Sampled(scripted(reply))
    limits: dict[str, Any] = {"max_steps": 5, "max_input_tokens": 9_000}
    played = kept.run(play(engine, list(tasks.values()), harbor(tmp_path / "trials"), **limits))
    found = dict(zip(tasks, played, strict=True))
    assert {name: outcome(trajectory) for name, trajectory in found.items()} == {
        "well": "done 1",
        "no_reward": "verifier",
        "empty": "verifier",
        "nan": "verifier",
        "words": "verifier",
        "slow_verifier": "verifier",
        "other_key": "verifier",
        "slow_agent": "done 1",  # verified after the time-out
        "context": "context 0",
        "engine": "engine",
        "steps": "max_steps 1",
        "no_tests": "verifier",
        "no_task": "verifier",
    }
    assert time.monotonic() - began < 600  # nothing was retried into its time-out
    assert found["slow_agent"].metrics["timed_out"] == 1 and "AgentTimeoutError" in found["slow_agent"].warning
    assert len(found["steps"].steps) == 5 and found["steps"].metrics["stopped"] == 1
    assert found["context"].metrics["context_exceeded"] == 1
    assert all(map(engine.recorded, played))
    assert not sandboxes()


@pytest.mark.slow
def test_a_sandbox_that_does_not_start_in_time_is_the_environments_failure(kept: KeptWorkers, tmp_path: Path) -> None:
    limit = {"environment_build_timeout_multiplier": 1 / 300}
    config = harbor(tmp_path / "trials", environment="broken:SlowStart", trial=limit)
    [found] = kept.run(play(scripted(playing(*WELL)), [write_task(tmp_path / "task")], config))
    assert found.failure is not None and found.failure.cause is Cause.ENVIRONMENT, found.failure
    assert not sandboxes()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trial": {"agnet": {}}}, "Harbor's trial configuration has no 'agnet'"),
        ({"trial": {"agent": {"kwargs": {"max_turn": 3}}}}, "max_turn"),
        ({"agent": "terminus-3"}, "terminus-3"),
        ({"environment": "nowhere"}, "nowhere"),
        ({"agent": "no_such_module:Agent"}, "no_such_module"),
    ],
)
def test_a_configuration_that_cannot_work_is_told_before_the_first_trial(
    kept: KeptWorkers, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, task = harbor(tmp_path / "t", **settings), write_task(tmp_path / "task")
    with pytest.raises(ConfigError, match=message):
        kept.run(play(scripted(playing(*WELL)), [task], config, check=True))


@pytest.mark.slow
def test_an_engine_whose_ids_do_not_arrive_is_told_before_the_first_trial(kept: KeptWorkers, tmp_path: Path) -> None:
    engine = scripted(lambda text: EngineError("out of order"))
    with pytest.raises(EngineError, match="a call through Harbor's LLM class, at http://127"):
        kept.run(play(engine, [write_task(tmp_path / "task")], harbor(tmp_path / "t"), check=True))


_DOCKER = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = ps ] && printf 'other__env\\n{name}__env\\n{name}__env\\n{name}0__env\\n' || true
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("who", ["worker", "run"])
def test_containers_that_a_killed_process_left_are_removed(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run begins by removing all of its own; when a worker is lost, those of the trials that it played."""
    config, trials = harbor(tmp_path / "trials", environment="docker"), tmp_path / "trials"
    names, log, docker = run_names(trials), tmp_path / "log", tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(_DOCKER.format(log=log, name=trial_name(names, "g0.0")))
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    if who == "worker":
        monkeypatch.setattr(WorkerPool, "call", lost_in_trials(WorkerPool.call))
    tasks = [write_task(tmp_path / "task")] if who == "worker" else []
    asyncio.run(play(scripted(playing(*WELL)), tasks, config))
    down = [line.split()[2] for line in log.read_text().splitlines() if " down " in line]
    of_trial = [f"{names}g0-0__env"]
    assert sorted(down[:2]) == [f"{names}g0-00__env", *of_trial]
    assert down[2:] == (of_trial if who == "worker" else [])


def lost_in_trials(call: Any) -> Any:
    """As if the process died that plays a trial."""

    async def lost(self: WorkerPool, payload: Any, stop: Any = None) -> Any:
        if "trial" in payload:
            raise TrajectoryFailure(Cause.INFRASTRUCTURE, "the worker was killed")
        return await call(self, payload, stop)

    return lost


def test_missing_parts_are_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_task(tmp_path / "task")
    bare = str(Path(sys.base_prefix) / "bin" / "python3")
    without = {"/nowhere/python": "is not an interpreter", bare: "No module named '(litellm|harbor)'"}
    for python, what in without.items():
        with pytest.raises(ConfigError, match=rf"{what}; set driver_options\.python .*make harbor-env") as told:
            asyncio.run(play(scripted(playing(*WELL)), [task], harbor(tmp_path / "t", python=python)))
        assert "\n" not in str(told.value)
    config = harbor(tmp_path / "t")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(ConfigError, match=r"needs bwrap and nsenter and setpriv and tmux, and there is none: apt-get"):
        asyncio.run(play(scripted(playing(*WELL)), [task], config))
