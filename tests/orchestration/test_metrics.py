"""Figures over trajectories and tasks, and the lines a person reads."""

from dataclasses import replace

import pytest

from tests.worlds import make_group, make_step
from treadle.core.errors import Cause
from treadle.core.rewards import Reward
from treadle.core.types import DropReason, Failure, Status, Task, Trajectory
from treadle.orchestration.metrics import evaluation_result, trajectory_metrics
from treadle.orchestration.progress import PlainProgress, evaluation_line, update_line


def attempt(reward: float | None, steps: int = 1, warning: str = "") -> Trajectory:
    failure = Failure(Cause.AGENT, "x") if reward is None else None
    status = Status.FAILED if failure else Status.DONE
    own = tuple(make_step([1] * (n + 1), [2, 3]) for n in range(steps))
    return Trajectory("g.0", "t", 0, own, reward, status, failure, warning)


def test_means_are_over_graded_trajectories_and_pass_at_k_over_tasks() -> None:
    groups = [
        make_group(0, attempt(1.0), attempt(0.0, steps=3), attempt(None, steps=5)),
        make_group(1, attempt(0.5), attempt(0.5, warning="close raised")),
        make_group(2, attempt(None), attempt(None)),
    ]
    row = trajectory_metrics(groups, success_at=1.0)
    assert row["reward_mean"] == 0.5
    assert row["success"] == 0.25
    assert row["pass_at_k"] == 0.5  # a task without a graded attempt is not a failed task
    assert row["equal_reward_groups"] == 0.5
    assert (row["trajectories"], row["failed"], row["warnings"]) == (7, 3, 1)
    assert (row["steps_mean"], row["completion_tokens_mean"]) == (1.5, 3.0)
    assert row["prompt_tokens_mean"] == (1 + (1 + 2 + 3) + 1 + 1) / 4
    assert row["ended_done"] == pytest.approx(4 / 7)
    assert row["ended_failed"] == pytest.approx(3 / 7)
    assert row["last_stop_stop"] == 1.0
    nothing = trajectory_metrics([make_group(0, attempt(None))], 1.0)
    assert (nothing["reward_mean"], nothing["success"], nothing["pass_at_k"]) == (None, None, None)
    rest = {"update": 1, "entropy": 0.0, "logprob_gap_max": 0.0, "seconds_rollout": 0.0, "seconds_update": 0.0}
    assert "reward -  success -" in update_line({**nothing, **rest}, 1)


def test_dropped_steps_do_not_count() -> None:
    whole = attempt(1.0, steps=2)
    lost = replace(make_step([1] * 50, []), dropped=DropReason.CANCELLED)
    with_lost = replace(whole, steps=(*whole.steps, lost))
    for success_at in (0.5, 1.0):
        told = [trajectory_metrics([make_group(0, t)], success_at) for t in (whole, with_lost)]
        assert told[0] == told[1]


def test_rewards_are_told_by_component_and_what_is_trained_apart_from_what_was_given() -> None:
    right, wrong = (_given({"answer": a, "page": 0.5}, shaping) for a, shaping in ((1.0, -0.25), (0.0, 0.0)))
    row = trajectory_metrics([make_group(0, right, wrong)], 1.0, "answer")
    assert (row["reward_mean"], row["success"], row["pass_at_k"]) == (1.0, 0.5, 1.0)
    assert (row["reward_answer_mean"], row["reward_page_mean"]) == (0.5, 0.5)
    assert (row["shaped_reward_mean"], row["overlong_dropped"]) == (0.875, 0)
    dropped = replace(right, dropped=DropReason.OVERLONG)
    row = trajectory_metrics([make_group(0, dropped, wrong)], 1.0, "answer")
    assert (row["reward_mean"], row["shaped_reward_mean"], row["overlong_dropped"]) == (1.0, 0.5, 1)
    assert row["steps_mean"] == 1.0
    plain = trajectory_metrics([make_group(0, attempt(1.0))], 1.0)
    assert not [name for name in plain if "shaped" in name or name.startswith(("reward_answer", "overlong"))]
    assert evaluation_result([make_group(0, wrong)], 1, 1.0, 0.5, None).success == 1.0
    assert evaluation_result([make_group(0, wrong)], 1, 1.0, 0.5, None, "answer").success == 0.0
    assert evaluation_result([make_group(0, attempt(1.0))], 1, 1.0, 0.5, None, "answer").success == 1.0


def _given(components: dict[str, float], shaping: float) -> Trajectory:
    given = Reward(components)
    step = replace(make_step(reward=given.total()), given=given, shaping=shaping)
    return Trajectory("g.0", "t", 0, (step,), given.total(), Status.DONE)


def test_an_evaluation_counts_failures_beside_its_means_and_splits_by_a_key() -> None:
    groups = [make_group(n, attempt(reward)) for n, reward in enumerate([1.0, 0.0, None])]
    for group, hops in zip(groups, (1, 2, 2), strict=True):
        object.__setattr__(group, "task", Task("t", extras={"hops": hops}))
    result = evaluation_result(groups, 7, 1.0, 1.0, "hops")
    assert (result.update, result.tasks, result.failed, result.success, result.reward_mean) == (7, 3, 1, 0.5, 0.5)
    assert (result.by, result.by_tasks) == ({"1": 1.0, "2": 0.0}, {"1": 1, "2": 1})
    assert evaluation_line(result) == (
        "held-out success 0.500 (3 tasks, 1 failed, temperature 1, after 7 updates)  1: 1.000  2: 0.000"
    )


def test_an_evaluation_without_a_graded_attempt_has_no_success() -> None:
    result = evaluation_result([make_group(0, attempt(None))], 7, 0.0, 1.0, None)
    assert (result.success, result.reward_mean, result.failed) == (None, None, 1)
    assert evaluation_line(result) == "held-out success - (1 tasks, 1 failed, greedy, after 7 updates)"


def test_plain_progress_prints_the_last_update_always(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        **trajectory_metrics([make_group(0, attempt(1.0), attempt(None))], 1.0),
        **{"entropy": 0.5, "logprob_gap_max": 2e-6, "seconds_rollout": 1.0, "seconds_update": 0.25},
    }
    progress = PlainProgress(interval=1000)
    progress.phase("rollout", 4)
    progress.advance(1, "note")
    for update in range(1, 13):
        progress.updated({**row, "update": update}, 12)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["rollout 1/4 note", update_line({**row, "update": 12}, 12)]
    assert lines[1].startswith("update 12/12  reward 1.000  success 1.000  steps 1.00")
    assert lines[1].endswith("gap 2e-06  rollout 1.00s  update 0.25s  FAILED 1/2")
