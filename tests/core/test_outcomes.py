"""What was played and what is trained, for every reason a step may be dropped for; and that nobody else decides it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.records import decisions, recorded_groups
from tests.worlds import make_group, make_step
from treadle.core.errors import Cause
from treadle.core.outcomes import (
    as_played,
    as_trained,
    dropped_steps,
    leave_out,
    outcome_when_recorded,
    reason_on_record,
    reject_reason,
    step_drop_reason,
    trains,
)
from treadle.core.rewards import Reward
from treadle.core.types import DropReason, Failure, Status, StepState, Trajectory

FIRST, SECOND = make_step([1], [2, 3], 0.25), replace(make_step([1, 2], [4], 0.75), shaping=-0.5)
DONE = Trajectory("g000000.0", "t", 0, (FIRST, SECOND), 1.0, Status.DONE)
FAILED = replace(DONE, reward=None, status=Status.FAILED, failure=Failure(Cause.TIMEOUT, "slow"))


@pytest.mark.parametrize("reason", DropReason)
def test_each_reason_of_a_step_says_whether_it_was_played(reason: DropReason) -> None:
    first = replace(FIRST, dropped=reason)
    trajectory = replace(DONE, steps=(first, SECOND))
    unused = reason in (DropReason.CANCELLED, DropReason.REJECTED)
    assert as_played(trajectory).steps == ((SECOND,) if unused else (first, SECOND))
    assert as_played(trajectory).reward == 1.0
    assert (as_trained(trajectory).steps, as_trained(trajectory).reward) == ((SECOND,), 0.5)
    assert list(dropped_steps([make_group(0, trajectory)])) == [("g000000.0", 0, reason)]


@pytest.mark.parametrize("reason", DropReason)
def test_each_reason_of_an_attempt_leaves_what_was_played(reason: DropReason) -> None:
    trajectory = replace(DONE, dropped=reason)
    assert as_played(trajectory) == as_played(DONE)
    assert (as_trained(trajectory).steps, as_trained(trajectory).reward) == ((), None)
    assert [step.reason for step in dropped_steps([make_group(0, trajectory)])] == [reason] * 2


def test_a_failed_attempt_was_played_and_trains_nothing() -> None:
    assert (as_played(FAILED).steps, as_played(FAILED).reward) == (FAILED.steps, None)
    assert (as_trained(FAILED).steps, as_trained(FAILED).reward) == ((), None)
    assert step_drop_reason(replace(FAILED, dropped=DropReason.FILTERED), FIRST) is DropReason.FAILED


def test_components_are_of_what_was_played() -> None:
    page, lost = Reward({"page": 0.5}), Reward({"page": 8.0})
    steps = (
        replace(FIRST, given=page, dropped=DropReason.STALE),
        replace(FIRST, given=page),
        replace(FIRST, given=lost, dropped=DropReason.CANCELLED),
    )
    assert as_played(replace(DONE, steps=steps)).components == {"page": 1.0}
    assert as_played(replace(FAILED, steps=steps)).components == {}


def test_states_when_recorded() -> None:
    cancelled = replace(FIRST, dropped=DropReason.CANCELLED)
    assert outcome_when_recorded(DONE, FIRST, "train") == (StepState.RECORDED, None)
    assert outcome_when_recorded(FAILED, FIRST, "train") == (StepState.DROPPED, DropReason.FAILED)
    assert outcome_when_recorded(FAILED, cancelled, "train") == (StepState.DROPPED, DropReason.CANCELLED)
    assert outcome_when_recorded(FAILED, FIRST, "held_out") == (StepState.EVALUATED, None)
    assert outcome_when_recorded(DONE, cancelled, "held_out") == (StepState.DROPPED, DropReason.CANCELLED)


def test_a_group_needs_graded_attempts_of_which_enough_train() -> None:
    overlong = replace(DONE, dropped=DropReason.OVERLONG)
    assert reject_reason(make_group(0, DONE, FAILED), 2) is DropReason.FAILED
    assert reject_reason(make_group(0, DONE, overlong), 2) is DropReason.OVERLONG
    assert reject_reason(make_group(0, DONE, DONE, FAILED), 2) is None
    assert [reason_on_record(t.reward, as_trained(t).reward) for t in (DONE, FAILED, overlong)] == [
        None, None, DropReason.OVERLONG
    ]  # fmt: skip


def test_only_some_attempts_may_be_left_out() -> None:
    other = replace(DONE, trajectory_id="g000000.1", dropped=DropReason.OVERLONG)
    group = make_group(0, DONE, other)
    assert [t.dropped for t in leave_out(group, DropReason.REFUSED, {"g000000.0"}).trajectories] == [
        DropReason.REFUSED, DropReason.OVERLONG
    ]  # fmt: skip
    assert [t.dropped for t in leave_out(group, DropReason.FILTERED).trajectories] == [
        DropReason.FILTERED, DropReason.OVERLONG
    ]  # fmt: skip
    assert trains(group) and not trains(leave_out(group, DropReason.FILTERED))


@settings(max_examples=30)
@given(st.data())
def test_each_recorded_step_is_trained_or_dropped_and_what_was_played_stays(data: st.DataObject) -> None:
    groups = data.draw(recorded_groups())
    decided = data.draw(decisions(groups))
    dropped = {(step.trajectory_id, step.step) for step in dropped_steps(decided)}
    for before, after in zip(groups, decided, strict=True):
        for was, now in zip(before.trajectories, after.trajectories, strict=True):
            trained = as_trained(now).steps
            for number, step in enumerate(now.steps):
                assert any(step is each for each in trained) != ((now.trajectory_id, number) in dropped)
            played = as_played(now)
            assert played.reward == was.reward and played.components == as_played(was).components
            assert [step.prompt_ids.tolist() for step in played.steps] == [
                step.prompt_ids.tolist() for step in as_played(was).steps
            ]
