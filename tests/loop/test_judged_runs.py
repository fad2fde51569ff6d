"""A run whose rewards come from a judge over real HTTP that fails in every way. Both are killed, and go on."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from tests.judge.failing import ANSWERS, failing_judge, share
from tests.judge.servers import TOKENS
from tests.runs import check_finished, query, resume, start
from tests.until import wait_until
from tests.worlds import ROOT, Vowels
from treadle.core.metrics import Metric
from treadle.core.types import Task
from treadle.envs.base import EnvStep, Finish
from treadle.judge import Criterion, Judge
from treadle.rollout.isolation.user_code import RUNNING

HERE = "tests.loop.test_judged_runs"
PROCESSES = ("first", "second")


@cache
def judge() -> Judge:
    return Judge("judge", [Criterion("vowels", "What is the share of vowels?", "number")], cache=os.environ["CACHE"])


class Judged(Vowels):
    """Its reward is the share of vowels, as the judge finds it. The last line of a transcript is the attempt's id."""

    metrics = (Metric("vowels", "trajectory", "mean"),)

    async def reset(self, task: Task) -> Any:
        self.text = ""
        return await super().reset(task)

    async def step(self, text: str) -> EnvStep:
        self.text += f"{text}\n"
        return (await super().step(text))._replace(reward=0.0)

    async def finish(self, ended: str) -> Finish:
        user = RUNNING.get()
        assert user is not None
        return Finish(await judge().grade(self.text + user.attempt.split()[-1]), {"vowels": share(self.text)})


def play(path: Path) -> None:
    """Start or resume a run of 512 attempts. What is on record when it is killed stays."""
    if path.exists():
        resume(path)
        return
    start(
        path,
        *(f"environment={HERE}:Judged", "data.train.options.count=64", "data.held_out=null"),
        *("training.tasks_per_update=16", "training.group_size=8", "training.min_group_size=1"),
        *("orchestration.updates=4", "orchestration.checkpoint_every=1", "engine.lock_step=false"),
        *("rollout.environment_timeout=300", "failures.max_failed_fraction=1"),
        f"models.judge={{url: '{os.environ['JUDGE']}', model: m, try_timeout: 15, timeout: 250, api_key_env: PROCESS}}",
    )


@pytest.mark.slow
def test_nothing_is_trained_with_an_invented_reward_or_judged_twice(tmp_path: Path) -> None:
    run, log, replies = tmp_path / "run", tmp_path / "log", tmp_path / "cache"

    def begin(process: str) -> subprocess.Popen[bytes]:
        code = f"from {HERE} import *; play(Path({str(run)!r}))"
        environment = os.environ | {"JUDGE": url, "CACHE": str(replies), "PROCESS": process}
        return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, start_new_session=True)

    def attempts() -> dict[str, dict[str, Any]]:
        rows = query(run, "SELECT trajectory_id, reward, failure_cause, metrics FROM trajectories")
        return {row["trajectory_id"]: row | {"metrics": json.loads(row["metrics"])} for row in rows}

    def calls(process: str, *outcomes: str) -> Counter[str]:
        """How many calls of an attempt had one of these outcomes, as the server says."""
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return Counter(name for key, what, name in lines if key == process and what in outcomes)

    with failing_judge(log) as url:
        first = begin("first")
        wait_until(lambda: calls("first", "answered").total() >= 220 or first.poll() is not None)
        os.killpg(first.pid, signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        before, kept = attempts(), len(list(replies.glob("*.txt")))
        assert begin("second").wait() == 0
    check_finished(run)  # what has a reward is trained, whatever became of its siblings
    after = attempts()
    assert len(after) == 512

    def cost(rows: dict[str, dict[str, Any]], name: str) -> float:
        return sum(float(row["metrics"].get(f"judge_{name}", {"total": 0})["total"]) for row in rows.values())

    failed = {name for name, row in after.items() if row["reward"] is None}
    assert {after[name]["failure_cause"] for name in failed} == {"verifier"}
    given_up = {
        p: calls(p, "refused") + Counter(n for n, c in calls(p, "nonsense").items() if c == 3) for p in PROCESSES
    }
    assert failed == {name for name in after if name in given_up["first" if name in before else "second"]}
    for name in after.keys() - failed:
        row = after[name]
        assert row["reward"] == pytest.approx(row["metrics"]["vowels"]["value"], abs=1e-9)

    replied, replied_again = (calls(process, "answered", "nonsense") for process in PROCESSES)
    assert cost(after, "calls") - cost(before, "calls") == replied_again.total()
    lost = sum(count for name, count in replied.items() if name not in before)  # attempts that had not ended
    assert cost(before, "calls") == replied.total() - lost
    assert cost(after, "tokens") == TOKENS * cost(after, "calls")
    assert cost(after, "verdicts") == len(after) - len(failed)

    known, asked_again = calls("first", "answered"), calls("second", *ANSWERS)
    assert before.keys() < after.keys() and not before.keys() & asked_again.keys()
    assert len(known.keys() & asked_again.keys()) == len(known) - kept  # of which the reply was in no file yet
