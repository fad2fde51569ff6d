"""Real Harbor, real Terminus-2, real verifier, a scripted model: what is recorded is what was sampled."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integrations.harbor.trials import (
    GREETING,
    ROOT,
    WELL,
    Sampled,
    answer,
    check_trained_once,
    harbor,
    play,
    playing,
    processes,
    python_with_harbor,
    sandboxes,
    scripted,
    shipped,
    turn,
    worker_of,
    write_task,
)
from tests.integrations.libraries import KeptWorkers
from tests.models import tiny as tiny_model
from tests.until import wait_until
from tests.worlds import END, PLAIN
from treadle.core.types import Status, Trajectory
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.integrations.harbor.tasks import harbor_sums


def test_the_shipped_tasks_are_played_and_graded(kept: KeptWorkers, tmp_path: Path) -> None:
    by_task = {
        "greeting": GREETING,
        "largest-file": "find /usr/bin -maxdepth 1 -type f -printf '%s %f\\n' | sort -n | tail -1 | "
        "cut -d' ' -f2- > answer.txt\n",
        "squares": "echo 'for i in $(seq $1); do echo $((i * i)); done' > squares.sh\n",
    }
    word = {"greeting": "hello.txt", "largest-file": "largest regular file", "squares": "squares.sh that"}

    def reply(text: str) -> str:
        command = next((command for task, command in by_task.items() if word[task] in text), "")  # none: the check
        if turn(text) == 0:
            return answer(f"{command}echo squ''irrel\n")  # typed otherwise than it is printed
        return answer(done=True) if "squirrel" in text else answer("")  # the commands are still running

    engine = Sampled(scripted(reply))
    found = kept.run(play(engine, [shipped(name) for name in by_task], harbor(tmp_path), check=True))
    for trajectory in found:
        assert (trajectory.status, trajectory.reward, trajectory.failure) == (Status.DONE, 1.0, None)
        assert engine.recorded(trajectory) and len(trajectory.steps) >= 3
        assert trajectory.metrics["calls_unreported"] == trajectory.metrics["calls_misreported"] == 0
        assert trajectory.metrics["agent_seconds"] > 0
    assert not list(tmp_path.iterdir())  # trial_directories: delete


@pytest.mark.slow
def test_a_task_of_two_steps(kept: KeptWorkers, tmp_path: Path) -> None:
    task = write_task(tmp_path / "two", steps=["First.", "Second."])
    engine = Sampled(scripted(playing(*WELL)))
    [found] = kept.run(play(engine, [task], harbor(tmp_path / "trials", trial_directories="keep")))
    assert (found.status, found.reward, len(found.steps)) == (Status.DONE, 1.0, 6)
    assert next((tmp_path / "trials").iterdir()).joinpath("result.json").is_file()


TOUCH = "touch /app/hello.txt"


def played(kept: KeptWorkers, engine: Any, agent: str, tmp_path: Path, **rollout: Any) -> Trajectory:
    config = harbor(tmp_path / "trials", agent=f"scripted_agents:{agent}")
    if agent != "Misreporting":  # the others do not have Terminus-2's options
        config = config.model_copy(update={"trial": {}})
    [found] = kept.run(play(engine, [write_task(tmp_path / "task")], config, **rollout))
    return found


def test_a_sub_agent_is_a_branch_of_its_attempt_and_each_sampled_token_is_trained_once(
    kept: KeptWorkers, tmp_path: Path
) -> None:
    def reply(text: str) -> str:
        last = text.rsplit("<|im_start|>user", 1)[1]
        if "The sub-agent says" in last:
            return TOUCH
        return "It is right." if "Check it." in last else f"Please see to this, {len(text)}."

    engine = Sampled(scripted(reply))
    found = played(kept, engine, "Delegating", tmp_path)
    assert (found.status, found.reward, len(found.steps)) == (Status.DONE, 1.0, 4)
    assert engine.recorded(found)
    check_trained_once(found)


def test_a_program_that_is_installed_in_the_sandbox_trains_just_the_same(kept: KeptWorkers, tmp_path: Path) -> None:
    engine = Sampled(scripted(playing(TOUCH, "ls /app")))
    found = played(kept, engine, "Program", tmp_path)
    assert (found.status, found.reward, len(found.steps)) == (Status.DONE, 1.0, 2)
    assert engine.recorded(found)
    assert found.metrics["calls_unreported"] == found.metrics["calls_misreported"] == 0  # it keeps no record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "expected"),
    [({"max_steps": 2}, (Status.MAX_STEPS, 1.0)), ({"max_input_tokens": 60}, (Status.CONTEXT, 0.0))],
    ids=["steps", "context"],
)
def test_an_agent_that_raises_when_it_is_refused_met_a_limit(
    kept: KeptWorkers, limits: dict[str, int], expected: tuple[Status, float], tmp_path: Path
) -> None:
    """Of the limit on calls it is verified, though the agent may raise before the word of it comes."""
    found = played(kept, Sampled(scripted(lambda text: "ok")), "NeverEnds", tmp_path, **limits)
    assert (found.status, found.reward) == expected, found.failure
    assert len(found.steps) >= 2


@pytest.mark.slow
def test_an_agents_own_record_that_is_wrong_is_a_metric_and_a_warning(kept: KeptWorkers, tmp_path: Path) -> None:
    engine = Sampled(scripted(playing(*WELL)))
    found = played(kept, engine, "Misreporting", tmp_path)
    assert (found.status, found.reward) == (Status.DONE, 1.0)
    assert engine.recorded(found)
    assert found.metrics["calls_misreported"] == found.metrics["calls_unreported"] == 1
    assert found.warning.startswith("the agent's own record (rollout_details) holds calls with other tokens")


def test_a_reply_with_a_zero_byte_is_wrong_and_not_a_failure(
    kept: KeptWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a model says is graded: no command can hold this."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    config = harbor(tmp_path / "trials", agent="treadle_small:OneReply", trial={})
    [task] = harbor_sums("train", 1)
    [found] = kept.run(play(scripted(playing(f"<answer> {task.ground_truth}</answer>\0")), [task], config))
    assert (found.status, found.reward, len(found.steps)) == (Status.DONE, 0.0, 1)


@pytest.mark.slow
def test_32_trials_at_once_are_recorded_as_sampled(kept: KeptWorkers, tmp_path: Path) -> None:
    engine = Sampled(scripted(playing(*WELL)))
    found = kept.run(play(engine, [shipped("greeting")] * 32, harbor(tmp_path), check=True))
    assert [(t.status, t.reward) for t in found] == [(Status.DONE, 1.0)] * 32
    assert all(map(engine.recorded, found))
    assert sum(t.metrics["calls_misreported"] + t.metrics["calls_unreported"] for t in found) == 0
    assert not sandboxes()


@pytest.mark.slow
def test_a_model_that_writes_nonsense_is_stopped_and_recorded(kept: KeptWorkers, tmp_path: Path) -> None:
    """A random policy under Terminus-2 never ends by itself: its replies are cut off, which is no turn."""
    vocabulary, context = len(PLAIN), 32_768
    model = tiny_model("qwen3", 0, vocab_size=vocabulary, max_position_embeddings=context)
    engine = Sampled(TorchEngine(model, TorchEngineOptions([END])))
    limits: dict[str, Any] = {"max_steps": 3, "max_completion_tokens": 24, "max_input_tokens": 20_000}
    found = kept.run(play(engine, [shipped("greeting")] * 32, harbor(tmp_path), **limits))
    for trajectory in found:
        assert (trajectory.status, trajectory.reward, len(trajectory.steps)) == (Status.MAX_STEPS, 0.0, 3)
        assert engine.recorded(trajectory)
        assert all(np.isfinite(step.logprobs).all() and (step.logprobs < 0).any() for step in trajectory.steps)


@pytest.mark.slow
def test_summaries_and_their_sub_agents_are_segments_of_one_tree(kept: KeptWorkers, tmp_path: Path) -> None:
    """A summary costs three calls, each with a history of its own; then the conversation begins anew."""

    def reply(text: str) -> str:
        last = text.rsplit("<|im_start|>user", 1)[1]
        if "You are about to hand off" in last:
            return "SUMMARY: the file was written"
        if "You are picking up work" in last:
            return "Q1? Q2? Q3? Q4? Q5?"
        if "The next agent has a few questions" in last:
            return "A1 A2 A3 A4 A5"
        if "Here are the answers" in last:
            return answer("cat /app/hello.txt\n", done=True)
        if "mark the task as complete" in last:
            return answer(done=True)
        return answer(f"{GREETING}{'echo ' + 'x' * 1500}\n") if turn(text) < 6 else answer(done=True)

    engine = Sampled(scripted(reply))
    kwargs = {"enable_summarize": True, "max_turns": 20, "proactive_summarization_threshold": 29_000}  # its own count
    trial = {"agent": {"kwargs": kwargs}}
    config = harbor(tmp_path / "trials", trial=trial)
    limits: dict[str, Any] = {"max_input_tokens": 30_000, "max_completion_tokens": 2000}
    [found] = kept.run(play(engine, [write_task(tmp_path / "task")], config, **limits))
    assert (found.status, found.reward) == (Status.DONE, 1.0)
    assert found.metrics["summaries"] >= 1
    assert engine.recorded(found)
    check_trained_once(found)


_RUN = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.integrations.harbor.trials import *
folder = Path({folder!r})
task = write_task(folder / "task")
busy = answer("sleep {seconds} &\\n", "sleep 1000\\n")
def reply(text):
    (folder / "began").touch()
    return busy
asyncio.run(play(scripted(reply), [task] * 2, harbor(folder / "trials")))
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("who", ["run", "worker"])
def test_nothing_is_left_after_a_kill(who: str, tmp_path: Path) -> None:
    python_with_harbor()
    assert not sandboxes()
    seconds = 1000 + os.getpid()  # other runs of the tests on this machine have others
    code = _RUN.format(root=str(ROOT), folder=str(tmp_path), seconds=seconds)
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: run.poll() is not None or ((tmp_path / "began").exists() and sandboxes()))
        assert run.poll() is None, run.communicate()[1][-2000:]
        os.kill(run.pid if who == "run" else worker_of(run.pid), signal.SIGKILL)
        wait_until(lambda: not sandboxes() and f"sleep {seconds}" not in processes())
    finally:
        run.kill()
        run.communicate()
