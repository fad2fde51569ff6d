"""Figures over trajectories and tasks, and the lines a person reads."""

import itertools
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import decisions, recorded_groups
from tests.worlds import make_group, make_step
from treadle.core.errors import Cause
from treadle.core.metrics import Measures, Metric, measured
from treadle.core.outcomes import as_played
from treadle.core.rewards import Reward
from treadle.core.types import DropReason, Failure, Status, Task, Trajectory
from treadle.packing.flat import flatten
from treadle.report.metrics import DECLARED, evaluation_result, pass_at, run_metrics, trajectory_metrics
from treadle.report.progress import PlainProgress, evaluation_lines, loading, update_line


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
    row = trajectory_metrics(groups, 2, success_at=1.0, version=0)  # of the first, one attempt was retried
    assert row["reward_mean"] == 0.5
    assert row["success"] == 0.25
    # a task without a graded attempt is not a failed task
    assert (row["pass_at_1"], row["pass_at_2"], row["pass_tasks"]) == (0.25, 0.5, 2)
    assert row["equal_reward_groups"] == 0.5
    assert (row["trajectories"], row["failed"], row["warnings"]) == (7, 3, 1)
    assert (row["steps_mean"], row["completion_tokens_mean"]) == (1.5, 3.0)
    assert row["prompt_tokens_mean"] == (1 + (1 + 2 + 3) + 1 + 1) / 4
    assert row["ended_done"] == pytest.approx(4 / 7)
    assert row["ended_failed"] == pytest.approx(3 / 7)
    assert row["last_stop_stop"] == 1.0
    nothing = trajectory_metrics([make_group(0, attempt(None))], 1, 1.0, 0)
    assert (nothing["reward_mean"], nothing["success"], nothing["pass_at_1"]) == (None, None, None)
    assert nothing["pass_tasks"] == 0
    rest = {"update": 1, "entropy": None, "logprob_gap_max": None, "seconds_rollout": 0.0, "seconds_update": 0.0}
    line = update_line({**nothing, **rest}, 1)
    assert "reward -  success -" in line and "entropy -  gap -" in line


def test_staleness_is_of_trajectories_and_of_trainable_tokens() -> None:
    """A trajectory is as stale as its oldest token; tokens that are not trained do not age."""
    versions = [np.array(v, np.int32) for v in ([3, 5], [4, 4])]
    steps = tuple(replace(make_step(), policy_versions=v, mask=np.array([False, True])) for v in versions)
    groups = [make_group(0, replace(attempt(1.0), steps=steps), attempt(0.0), attempt(0.5, steps=0))]
    row = trajectory_metrics(groups, 3, 1.0, version=5)
    assert (row["staleness_mean"], row["staleness_max"]) == ((2 + 5) / 2, 5)
    assert row["token_staleness_mean"] == (0 + 1 + 5 + 5) / 4


@given(st.data())
def test_pass_at_k_is_the_mean_over_all_choices_of_k_attempts(data: st.DataObject) -> None:
    wins = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    k = data.draw(st.integers(1, len(wins)))
    choices = [any(chosen) for chosen in itertools.combinations(wins, k)]
    assert pass_at(k, len(wins), sum(wins)) == pytest.approx(sum(choices) / len(choices))


@pytest.mark.parametrize(("size", "shown"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_pass_at_k_is_told_for_powers_of_two_and_the_group(size: int, shown: list[int]) -> None:
    row = trajectory_metrics([make_group(0, *(attempt(float(n == 0)) for n in range(size)))], size, 1.0, 0)
    assert [name for name in row if name.startswith("pass_at_")] == [f"pass_at_{k}" for k in shown]
    assert row["pass_at_1"] == pytest.approx(1 / size) and row[f"pass_at_{size}"] == 1.0


REWARDS = st.none() | st.sampled_from([-1.0, 0.0, 0.25, 1.0])
GROUPS = st.lists(st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=4), min_size=1, max_size=6)


@given(GROUPS, st.lists(st.integers(0, 6), max_size=3))
def test_parts_of_a_batch_add_up_to_the_whole(shape: list[list[tuple[float | None, int]]], cuts: list[int]) -> None:
    """Groups, however they are split over updates or ranks."""
    groups = [make_group(n, *(attempt(*each) for each in group)) for n, group in enumerate(shape)]
    edges = [0, *sorted(cuts), len(groups)]
    parts = [trajectory_metrics(groups[a:b], 4, 1.0, 3) for a, b in itertools.pairwise(edges)]
    whole = trajectory_metrics(groups, 4, 1.0, 3)
    assert dict(sum(parts, Measures())) == pytest.approx(dict(whole), abs=1e-12)


@given(GROUPS)
def test_each_metric_counts_the_units_of_its_level(shape: list[list[tuple[float | None, int]]]) -> None:
    """So that what is counted per step is never told as per trajectory."""
    groups = [make_group(n, *(attempt(*each) for each in group)) for n, group in enumerate(shape)]
    everyone = [t for group in groups for t in group.trajectories]
    graded = [t for t in everyone if t.reward is not None]
    most = {
        "task": sum(any(t.reward is not None for t in group.trajectories) for group in groups),
        "trajectory": len(graded),
        "step": sum(len(t.steps) for t in everyone),
        "token": sum(as_played(t).completion_tokens for t in graded),
    }
    partial = (
        "pass_at_",
        "last_stop_",
        "one_version",
        "staleness_",
        "trained_staleness_",
        "engine_share",
    )  # not every unit has a value
    for tally in trajectory_metrics(groups, 4, 1.0, 0).tallies:
        name, units = tally.metric.name, most.get(tally.metric.level, 0)
        if name.startswith("ended_"):
            assert tally.count == len(everyone)
        elif tally.metric.aggregation == "mean":
            assert tally.count == units or (name.startswith(partial) and tally.count < units), name


@given(st.data())
def test_metrics_of_what_was_played_are_the_same_whatever_is_dropped_afterwards(data: st.DataObject) -> None:
    groups = data.draw(recorded_groups())
    before, after = (
        {tally.metric.name: tally for tally in trajectory_metrics(each, 2, 1.0, 5, "page").tallies}
        for each in (groups, data.draw(decisions(groups)))
    )
    for rows in (before, after):
        for name in [name for name, tally in rows.items() if tally.metric.view != "played"]:
            del rows[name]
    assert after == before and len(after) > 20


@given(st.data())
def test_metrics_of_what_is_trained_count_exactly_that(data: st.DataObject) -> None:
    """As the learner gets it; and what is dropped is all the rest."""
    groups = data.draw(recorded_groups().flatmap(decisions))
    batch, row = flatten(groups), trajectory_metrics(groups, 2, 1.0, version=5)
    recorded = sum(len(t.steps) for group in groups for t in group.trajectories)
    assert len(batch.steps) + sum(row[name] for name in row if name.startswith("dropped_")) == recorded
    versions = [batch.version[batch.trajectory_id == j] for j in range(len(batch.trajectories))]
    lag = [5 - own.min() for own in versions if len(own)]
    assert row["trained_staleness_max"] == max(lag, default=None)
    assert row["trained_staleness_mean"] == (pytest.approx(np.mean(lag)) if lag else None)
    if "shaped_reward_mean" in row:
        assert row["shaped_reward_mean"] == (pytest.approx(batch.rewards.mean()) if len(batch.rewards) else None)


def test_every_metric_of_a_row_is_declared_once() -> None:
    assert len({metric.name for metric in DECLARED}) == len(DECLARED) > 40
    assert all(metric.help and metric.unit != "%" for metric in DECLARED)
    patterns = [re.compile(re.escape(metric.name).replace(r"\*", r"\w+") + "$") for metric in DECLARED]
    groups = [make_group(0, attempt(1.0), attempt(None, warning="x"))]
    row = trajectory_metrics(groups, 2, 1.0, 0) + run_metrics({"rollout": 1.0}, 2.0, 3.0, 0)
    assert [name for name in row if not any(pattern.match(name) for pattern in patterns)] == []


def test_an_environments_metrics_are_named_apart_and_keep_their_level() -> None:
    searches = Metric("searches", "trajectory", "mean")
    slow = Metric("slow", "step", "mean", "share")
    told = [measured("trajectory", {searches: [n]}) + measured("step", {slow: [True, *[False] * n]}) for n in (1, 4)]
    groups = [make_group(0, *(replace(attempt(1.0), metrics=own) for own in told), attempt(None), attempt(0.0))]
    row = trajectory_metrics(groups, 4, 1.0, 0)
    assert (row["env/searches"], row["env/slow"]) == (2.5, 2 / 7)  # 7 steps; the mean over trajectories would be 0.35
    assert evaluation_result(groups, 4, 1, 1.0, 1.0, None).metrics == {"env/searches": 2.5, "env/slow": 2 / 7}


def test_rewards_are_told_by_component_and_what_is_trained_apart_from_what_was_given() -> None:
    right, wrong = (_given({"answer": a, "page": 0.5}, shaping) for a, shaping in ((1.0, -0.25), (0.0, 0.0)))
    row = trajectory_metrics([make_group(0, right, wrong)], 2, 1.0, 0, success_of="answer")
    assert (row["reward_mean"], row["success"], row["pass_at_2"]) == (1.0, 0.5, 1.0)
    assert (row["reward_answer_mean"], row["reward_page_mean"]) == (0.5, 0.5)
    assert (row["shaped_reward_mean"], "dropped_overlong" in row) == (0.875, False)
    dropped = replace(right, dropped=DropReason.OVERLONG)
    row = trajectory_metrics([make_group(0, dropped, wrong)], 2, 1.0, 0, success_of="answer")
    assert (row["reward_mean"], row["shaped_reward_mean"], row["dropped_overlong"]) == (1.0, 0.5, 1)
    assert row["steps_mean"] == 1.0
    plain = trajectory_metrics([make_group(0, attempt(1.0))], 1, 1.0, 0)
    assert not [name for name in plain if "shaped" in name or name.startswith(("reward_answer", "overlong"))]
    assert evaluation_result([make_group(0, wrong)], 1, 1, 1.0, 0.5, None).success == 1.0
    assert evaluation_result([make_group(0, wrong)], 1, 1, 1.0, 0.5, None, "answer").success == 0.0
    assert evaluation_result([make_group(0, attempt(1.0))], 1, 1, 1.0, 0.5, None, "answer").success == 1.0


def _given(components: dict[str, float], shaping: float) -> Trajectory:
    given = Reward(components)
    step = replace(make_step(reward=given.total()), given=given, shaping=shaping)
    return Trajectory("g.0", "t", 0, (step,), given.total(), Status.DONE)


def test_an_evaluation_counts_failures_beside_its_means_and_splits_by_a_key() -> None:
    groups = [make_group(n, attempt(reward)) for n, reward in enumerate([1.0, 0.0, None])]
    for group, hops in zip(groups, (1, 2, 2), strict=True):
        object.__setattr__(group, "task", Task("t", extras={"hops": hops}))
    assert evaluation_result(groups, 1, 7, 1.0, 1.0, "tools").by == {}  # of another recipe's tasks
    result = evaluation_result(groups, 1, 7, 1.0, 1.0, "hops")
    assert (result.update, result.tasks, result.failed, result.success, result.reward_mean) == (7, 3, 1, 0.5, 0.5)
    assert (result.by, result.by_tasks) == ({"1": 1.0, "2": 0.0}, {"1": 1, "2": 1})
    told = "held-out success 0.500 (3 tasks, 1 failed, temperature 1, after 7 updates)"
    assert evaluation_lines(result, "hops") == [f"{told}  hops 1: 1.000  2: 0.000"]
    assert evaluation_lines(result, "hops", 80) == [told, "  hops 1: 1.000  2: 0.000"]
    assert evaluation_lines(result, "hops", 20) == [told, "  hops 1: 1.000", "  2: 0.000"]


def test_an_evaluation_of_several_attempts_counts_tasks_and_estimates_pass_at_k() -> None:
    groups = [
        make_group(0, attempt(1.0), attempt(0.0), attempt(0.0), attempt(0.0)),
        make_group(1, attempt(1.0), attempt(1.0), attempt(1.0), attempt(None)),
    ]
    result = evaluation_result(groups, 4, 7, 1.0, 1.0, None)
    assert (result.tasks, result.attempts, result.failed, result.success) == (2, 4, 1, 4 / 7)
    assert (result.pass_at, result.pass_tasks) == ({"1": 0.25, "2": 0.5, "4": 1.0}, 1)  # of the first task alone
    told = "held-out success 0.571 (2 tasks x 4, 1 failed, temperature 1, after 7 updates)"
    assert evaluation_lines(result) == [f"{told}  pass@1 0.250  pass@2 0.500  pass@4 1.000 of 1 task"]


def test_pass_at_k_does_not_fall_as_k_grows_where_attempts_failed() -> None:
    """The second task is the only one of which two attempts are graded."""
    groups = [
        make_group(0, attempt(1.0), attempt(None), attempt(None), attempt(None)),
        make_group(1, attempt(0.0), attempt(0.0), attempt(0.0), attempt(0.0)),
        make_group(2, attempt(None), attempt(None), attempt(None), attempt(None)),
    ]
    result = evaluation_result(groups, 4, 0, 1.0, 1.0, None)
    assert (result.success, result.pass_at, result.pass_tasks) == (0.2, {"1": 0.0, "2": 0.0, "4": 0.0}, 1)
    nothing = evaluation_result(groups[::2], 4, 0, 1.0, 1.0, None)
    assert (nothing.success, nothing.pass_at, nothing.pass_tasks) == (1.0, {"1": None, "2": None, "4": None}, 0)
    assert "pass@1 -  pass@2 -  pass@4 - of 0 tasks" in evaluation_lines(nothing)[0]


@given(GROUPS, st.integers(1, 5))
def test_pass_at_k_is_of_the_same_tasks_for_all_k(shape: list[list[tuple[float | None, int]]], attempts: int) -> None:
    """Whatever failed, and however often it was retried; its size is told."""
    groups = [make_group(n, *(attempt(*each) for each in group)) for n, group in enumerate(shape)]
    row = trajectory_metrics(groups, attempts, 1.0, 0)
    passes = [tally for tally in row.tallies if tally.metric.name.startswith("pass_at_")]
    assert {tally.count for tally in passes} == {row["pass_tasks"]}
    assert passes[-1].metric.name == f"pass_at_{attempts}"
    if row["pass_tasks"]:
        assert [tally.value for tally in passes] == sorted(tally.value or 0.0 for tally in passes)
    result = evaluation_result(groups, attempts, 0, 1.0, 1.0, None)
    assert result.pass_tasks == row["pass_tasks"]
    assert result.pass_at == ({k.metric.name[8:]: k.value for k in passes} if attempts > 1 else {})


ROW = {
    **trajectory_metrics([make_group(0, attempt(1.0))], 1, 1.0, 0),
    **{"entropy": 0.5, "logprob_gap_max": 2e-6, "seconds_rollout": 1.0, "seconds_update": 0.25},
}
FAILED = {**ROW, "failed": 1, "trajectories": 2}


def test_without_a_terminal_every_update_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever else is told in between: 40 updates of one second each, 256 attempts an update."""
    progress = PlainProgress(40)
    progress.log("run directory: runs/x")
    for update in range(1, 41):
        for done in range(257):
            progress.phase("rollout", done, 256)
        progress.update({**ROW, "update": update})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [update_line({**ROW, "update": update}, 40) for update in range(1, 41)]


def test_progress_in_between_is_told_when_nothing_else_was_for_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = PlainProgress(2)
    for done in range(1, 101):
        now += 1.0
        progress.phase("rollout", done, 256, "slow")
        if done == 50:
            progress.update({**ROW, "update": 1})
    update = update_line({**ROW, "update": 1}, 2)
    told = ["rollout 1/256 slow", "rollout 31/256 slow", update, "rollout 80/256 slow"]
    assert capsys.readouterr().out.splitlines() == told


@given(st.integers(40, 160), st.booleans())
def test_an_update_line_fits_the_width_with_whole_figures_and_its_failures(width: int, failed: bool) -> None:
    row = {**(FAILED if failed else ROW), "update": 37}
    line, whole = update_line(row, 200, width), update_line(row, 200)
    assert len(line) <= width
    assert line.endswith("  FAILED 1/2") == failed
    figures = line.removesuffix("  FAILED 1/2").split("  ")
    assert figures == whole.split("  ")[: len(figures)] and len(figures) >= 2


def test_the_first_line_says_that_pytorch_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with loading(PlainProgress()):  # it is here already
        pass
    assert capsys.readouterr().out == ""
    monkeypatch.delitem(sys.modules, "torch")
    progress = PlainProgress()
    with loading(progress):
        pass
    progress.phase("sft", 1, 10)
    assert capsys.readouterr().out == "loading PyTorch and transformers\nsft 1/10\n"


def test_a_library_that_swallows_ctrl_c_while_it_is_imported_does_not_keep_it() -> None:
    def imported(error: Exception | None) -> None:
        with loading(PlainProgress()):
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            if error is not None:
                raise error

    for error in (None, ImportError("initialization failed")):
        with pytest.raises(KeyboardInterrupt):
            imported(error)
