"""Many trials at once, segments that agents fork off, an update trained from trials, and nothing left after a kill."""

import os
import shutil
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
from treadle.core.types import Status
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions


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


@pytest.mark.parametrize(("environment", "count"), [({}, 0), (None, 1)])
def test_only_own_sandboxes_are_looked_at(environment: dict[str, str] | None, count: int) -> None:
    words = ["bwrap --die-with-parent", "1000"]
    with subprocess.Popen(words, executable=shutil.which("sleep"), env=environment) as other:
        listed = [line.split()[0] for line in sandboxes()]
        other.kill()
    assert listed.count(str(other.pid)) == count


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
