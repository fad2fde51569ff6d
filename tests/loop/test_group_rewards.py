"""`rewards.group`: attempts that are rewarded together, in whole runs."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs import check_finished, query, resume, start
from tests.worlds import Quiet, Vowels
from treadle.core.metrics import Metric
from treadle.core.rewards import Reward
from treadle.core.types import Task, Trajectory
from treadle.envs.base import EnvStep, Finish

HERE = "tests.loop.test_group_rewards"
AT_THE_END = (f"environment={HERE}:AtTheEnd", "rollout.environment_timeout=20")


class AtTheEnd(Vowels):
    """Rewards nothing, and measures; with `pays`, the same is its reward at the end."""

    metrics = (Metric("vowels", "trajectory", "mean"),)

    def __init__(self, pays: bool = False) -> None:
        self.pays, self.score = pays, 0.0

    async def step(self, text: str) -> EnvStep:
        answer = await super().step(text)
        self.score += float(answer.reward)  # type: ignore[arg-type]
        return answer._replace(reward=0.0)

    async def finish(self, ended: str) -> Finish:
        return Finish(named(self.score) if self.pays else 0.0, {"vowels": self.score})


def named(score: float) -> Reward:
    return Reward({"vowels": score, "reward": 0.5})


def by_measure(task: Task, trajectories: Sequence[Trajectory]) -> list[Reward]:
    return [named(t.metrics["vowels"]) for t in trajectories]


def long_ones_less(task: Task, trajectory: Trajectory) -> list[float]:
    assert trajectory.reward is not None
    return [-trajectory.reward / 8 for step in trajectory.steps]


def test_they_train_the_same_bits_as_rewards_of_each_attempt(tmp_path: Path) -> None:
    options = (
        *(*AT_THE_END, "orchestration.updates=2", "rewards.weights={vowels: 2.0}", "training.min_group_size=1"),
        *(f"rewards.shaping={HERE}:long_ones_less", "rewards.overlong=zero_reward"),
        "rewards.length_penalty={free: 2, limit: 20}",
    )
    alone = start(tmp_path / "alone", *options, "environment_options={pays: true}")
    together = start(tmp_path / "together", *options, f"rewards.group={HERE}:by_measure")
    assert together["weights_sha256"] == alone["weights_sha256"]
    check_finished(tmp_path / "together")
    columns = "SELECT trajectory_id, reward, trained_reward, components, advantage FROM trajectories ORDER BY 1"
    assert query(tmp_path / "together", columns) == query(tmp_path / "alone", columns)
    assert query(tmp_path / "together", columns)[0]["reward"] > 0.5


class Unlucky(AtTheEnd):
    """Every third attempt fails."""

    count = 0

    async def finish(self, ended: str) -> Finish:
        Unlucky.count += 1
        if Unlucky.count % 3 == 0:
            raise RuntimeError("no luck")
        return await super().finish(ended)


tries = Counter[str]()


def failing_at_first(task: Task, trajectories: Sequence[Trajectory]) -> list[Any]:
    """For each task the first try fails; of the training task 0 each one does."""
    assert all(t.reward == 0.0 for t in trajectories)
    tries[task.task_id] += 1
    if task.task_id == "train-0" or tries[task.task_id] == 1:
        raise ValueError("no judge")
    return [1.0] * len(trajectories)


@pytest.mark.slow
def test_failed_members_end_no_group_and_what_fails_is_tried_again(tmp_path: Path) -> None:
    tries.clear()
    start(
        tmp_path / "run",
        *(f"environment={HERE}:Unlucky", f"rewards.group={HERE}:failing_at_first", "training.min_group_size=1"),
        *("orchestration.updates=3", "data.held_out=null", "failures.max_failed_fraction=1"),
        *("failures.causes={verifier: {retries: 1, backoff: 0}}",),
    )
    check_finished(tmp_path / "run")
    columns = "task, reward, failure_cause, failure_message"
    rows = query(tmp_path / "run", f"SELECT {columns} FROM trajectories JOIN groups USING (group_id)")
    hopeless = [row for row in rows if '"train-0"' in row["task"]]
    others = [row for row in rows if '"train-0"' not in row["task"]]
    assert {row["failure_cause"] for row in hopeless} >= {"verifier"} and not any(row["reward"] for row in hopeless)
    assert any(row["failure_message"] == "rewards.group raised ValueError: no judge" for row in hopeless)
    assert {(row["failure_cause"], row["reward"]) for row in others} == {(None, 1.0), ("environment", None)}


ended = Counter[str]()
asked: list[str] = []


async def interrupted(task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
    """The third group asks for the run's end once two are on record. It, and later ones, get theirs in another run."""
    if len(ended) == 2 and not os.environ.get("RESUMED"):
        if not asked:
            asked.append(task.task_id)
            while len(query(Path(os.environ["RUN"]), "SELECT 1 FROM trajectories")) < 6:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
    ended[trajectories[0].trajectory_id.partition(".")[0]] += 1
    return [float(len(ended))] * len(trajectories)


def test_a_resumed_run_rewards_the_groups_that_are_not_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended.clear()
    asked.clear()
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    start(
        tmp_path / "run",
        *(f"environment={HERE}:AtTheEnd", f"rewards.group={HERE}:interrupted", "orchestration.max_staleness=2"),
        *("data.held_out=null", "orchestration.updates=3", "algorithm.advantage=reinforce++"),
    )
    assert len(ended) == 2
    [row] = query(tmp_path / "run", "SELECT count(*) AS attempts, min(reward) AS least FROM trajectories")
    assert (row["attempts"], row["least"]) == (6, 1.0)  # none without its group's reward
    [calls] = query(tmp_path / "run", "SELECT count(DISTINCT position * 100 + attempt) AS attempts FROM open_calls")
    assert calls["attempts"] >= 3
    monkeypatch.setenv("RESUMED", "1")
    progress = Quiet()
    resume(tmp_path / "run", progress=progress)
    check_finished(tmp_path / "run")
    assert any("unfinished attempts continue after" in line for line in progress.lines)
    assert set(ended.values()) == {1}  # nothing twice
