"""Held-out attempts that fail: retried, rewarded and graded as in training, and what they cost."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clocks import virtually
from tests.loop.groups import make_tasks
from tests.runs import check_finished, query, start
from tests.worlds import plain_rollouts, saying, tiny
from treadle.core.errors import Cause, TrajectoryFailure
from treadle.core.metrics import Metric, measured
from treadle.core.types import Group, Message, Status, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.loop.evaluation import play_held_out
from treadle.record.run_directory import RunDirectory
from treadle.report.metrics import evaluation_result
from treadle.report.rewards import lone_attempts
from treadle.rollout.isolation.user_code import RUNNING
from treadle.rollout.rewards import RewardShaper

HERE = "tests.loop.test_evaluation"
CALLS = Metric("judge_calls", "trajectory", "sum", "calls")
played = Counter[str]()  # attempts by task
rewarded = Counter[str]()  # calls of `after_two` by task


class Fragile(Environment):
    """Of each task the first attempts fail, `failing` of them. Each asks a judge once."""

    failing = 2
    cause = Cause.INFRASTRUCTURE

    async def reset(self, task: Task) -> Sequence[Message]:
        played[task.task_id] += 1
        self.fails = played[task.task_id] <= self.failing
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        user = RUNNING.get()
        assert user is not None
        user.measured += measured("trajectory", {CALLS: [1]})
        if self.fails:
            raise TrajectoryFailure(self.cause, "out of order")
        return EnvStep(reward=1.0, done=True)


@pytest.fixture(autouse=True)
def anew() -> None:
    played.clear()
    rewarded.clear()


def evaluate(*overrides: str, world: type[Environment] = Fragile) -> tuple[list[Group], int, float]:
    """Two attempts at each of three tasks: their groups, the number of finished attempts, and the seconds it took."""
    config, ended = tiny("evaluation.attempts=2", *overrides), list[None]()
    attempts = config.evaluation.attempts

    async def go() -> tuple[list[Group], float]:
        runner, shaper = plain_rollouts(saying("a"), world), RewardShaper(config.rewards, 60.0)
        groups = await play_held_out(
            runner,
            replace(config.loop, held_out=make_tasks(3)),
            name="e000000",
            update=0,
            temperature=1.0,
            on_trajectory=lambda: ended.append(None),
            shaper=shaper,
        )
        return groups, asyncio.get_running_loop().time()

    groups, seconds = virtually(go())
    assert all(group.trajectories[-1].attempt >= attempts - 1 for group in groups)
    return groups, len(ended), seconds


def fates(group: Group) -> list[tuple[int, str, float | None]]:
    return [(t.attempt, str(t.status), t.reward) for t in group.trajectories]


def test_an_attempt_that_infrastructure_failed_is_retried() -> None:
    groups, ended, seconds = evaluate()
    assert all(
        fates(group) == [(0, "failed", None), (1, "failed", None), (2, "done", 1.0), (3, "done", 1.0)]
        for group in groups
    )
    assert (ended, 1.0 <= seconds < 2.0) == (6, True)
    assert [t.trajectory_id for t in groups[1].trajectories] == [f"e000000-0001.{n}" for n in range(4)]
    result = evaluation_result(groups, 2, 0, 1.0, 1.0, None)
    assert (result.failed, result.success, result.pass_at) == (0, 1.0, {"1": 1.0, "2": 1.0})
    assert result.metrics["env/judge_calls"] == 12


def test_it_is_not_where_training_would_not_retry_it() -> None:
    groups, ended, seconds = evaluate("failures.causes={infrastructure: {retries: 0}}")
    assert all(fates(group) == [(0, "failed", None), (1, "failed", None)] for group in groups)
    result = evaluation_result(groups, 2, 0, 1.0, 1.0, None)
    assert (ended, seconds < 1.0, result.failed, result.success, result.pass_tasks) == (6, True, 6, None, 0)
    assert result.metrics["env/judge_calls"] == 6


def test_the_last_of_several_retries_may_fail_and_be_graded() -> None:
    class Dead(Fragile):
        failing = 100

    groups, ended, seconds = evaluate("failures.causes={infrastructure: {grade: -1}}", world=Dead)
    assert [t.attempt for t in groups[0].trajectories] == [0, 1, 2, 3, 4, 5]
    assert fates(groups[0])[3:] == [(3, "failed", None), (4, "graded", -1.0), (5, "graded", -1.0)]
    assert (ended, 3.0 <= seconds < 4.0) == (6, True)  # after 1 s, and another 2
    result = evaluation_result(groups, 2, 0, 1.0, 1.0, None)
    assert (result.failed, result.success, result.reward_mean) == (0, 0.0, -1.0)


def test_one_attempt_at_a_task_is_retried_where_others_are_not() -> None:
    class Once(Fragile):
        failing = 1

    groups, ended, _ = evaluate(world=Once)
    assert all(fates(group) == [(0, "failed", None), (1, "done", 1.0), (2, "done", 1.0)] for group in groups)
    assert ended == 6


async def after_two(task: Task, trajectories: Sequence[Trajectory]) -> list[float]:
    """The first two calls for a task fail."""
    rewarded[task.task_id] += 1
    if rewarded[task.task_id] <= 2:
        raise ValueError("no judge")
    return [float(len(trajectories))] * len(trajectories)


def test_a_group_reward_that_fails_is_asked_again_and_nothing_is_played_again() -> None:
    options = (f"rewards.group={HERE}:after_two", "failures.causes={verifier: {retries: 2}}")
    groups, _, seconds = evaluate(*options)
    assert all(fates(group)[2:] == [(2, "done", 3.0), (3, "done", 3.0)] for group in groups)
    assert set(played.values()) == {4} and set(rewarded.values()) == {3}
    assert 4.0 <= seconds < 5.0  # 1 s for the attempts, 1 and 2 for the rewards
    rewarded.clear()
    groups, _, _ = evaluate(f"rewards.group={HERE}:after_two")
    assert {(t.failure.cause, t.status) for g in groups for t in g.trajectories if t.failure} == {
        (Cause.VERIFIER, Status.FAILED)
    }


def test_a_group_reward_with_nothing_to_compare_is_named() -> None:
    group = f"rewards.group={HERE}:after_two"
    assert [line.rpartition("set ")[2] for line in lone_attempts(tiny(group).grading)] == ["evaluation.attempts=3"]
    assert not [*lone_attempts(tiny(group, "evaluation.attempts=3").grading), *lone_attempts(tiny().grading)]


def test_costs_of_a_run_are_those_of_all_attempts_on_record(tmp_path: Path) -> None:
    start(
        tmp_path / "run",
        f"environment={HERE}:Fragile",
        "evaluation.attempts=2",
        "failures.causes.infrastructure={backoff: 0}",
    )
    check_finished(tmp_path / "run")
    recorded = Counter[str]()
    for row in query(tmp_path / "run", "SELECT group_id, metrics FROM trajectories WHERE group_id GLOB 'e*'"):
        recorded[row["group_id"].partition("-")[0]] += json.loads(row["metrics"])["judge_calls"]["total"]
    evaluations = [row for row in RunDirectory.open(tmp_path / "run").metrics() if row["kind"] == "evaluation"]
    assert {f"e{row['update']:06d}": row["metrics"]["env/judge_calls"] for row in evaluations} == recorded
    assert recorded["e000000"] == 12 and [row["failed"] for row in evaluations] == [0] * len(evaluations)
    first = evaluations[0]
    assert (first["tasks"], first["attempts"], first["pass_tasks"]) == (3, 2, 3)
