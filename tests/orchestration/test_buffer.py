"""Which groups make a batch, when, and what is left of those that come late."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worlds import make_group, make_step
from treadle.core.errors import Cause
from treadle.core.outcomes import as_trained, without_stale
from treadle.core.types import DropReason, Failure, Group, Status, Trajectory
from treadle.orchestration.buffer import GroupBuffer, Late


def sampled_by(index: int, *versions: int) -> Group:
    """A group of one trajectory, with a step of each version."""
    steps = [replace(make_step(), policy_versions=np.full(2, version, np.int32)) for version in versions]
    return make_group(index, Trajectory(f"g{index:06d}.0", "t", 0, tuple(steps), 1.0, Status.DONE))


def buffer_of(staleness: int, late: Late) -> tuple[GroupBuffer, list[tuple[int, DropReason]]]:
    discarded: list[tuple[int, DropReason]] = []
    buffer = GroupBuffer(
        max_staleness=staleness,
        late=late,
        judge=lambda group: None,
        discard=lambda group, reason: discarded.append((group.index, reason)),
    )
    return buffer, discarded


def indices(batch: list[Group] | None) -> list[int] | None:
    return None if batch is None else [group.index for group in batch]


def live(group: Group) -> list[int]:
    return [len(as_trained(t).steps) for t in group.trajectories]


def test_the_oldest_come_first_and_a_batch_is_in_order_of_submission() -> None:
    buffer, _ = buffer_of(3, "mask_steps")
    for index, version in ((0, 1), (1, 0), (2, 0), (3, 1)):
        buffer.expect(index, version)
    assert (buffer.running, buffer.under_way, buffer.batch(2, 1)) == (4, 4, None)
    for index in (3, 1, 0):
        buffer.put(sampled_by(index, 1))
    assert indices(buffer.batch(2, 1)) == [0, 1]
    assert (buffer.outstanding, buffer.under_way) == ((2, 3), 4)  # until what was taken is published
    buffer.trained()
    assert buffer.under_way == 2


@pytest.mark.parametrize(
    ("late", "expected", "left", "dropped"),
    [
        ("mask_steps", [0, 1], [[2], [1]], []),
        ("drop", None, [], [(1, DropReason.STALE)]),
    ],
)
def test_what_is_late(late: Late, expected: Any, left: Any, dropped: Any) -> None:
    buffer, discarded = buffer_of(1, late)
    for index in range(2):
        buffer.expect(index, 0)
    buffer.put(sampled_by(0, 2, 3))
    buffer.put(sampled_by(1, 1, 2))
    batch = buffer.batch(2, 3)
    assert (indices(batch), [live(group) for group in batch or ()], discarded) == (expected, left, dropped)


FAILED = Trajectory("g000000.1", "t", 1, (make_step(),), None, Status.FAILED, Failure(Cause.TIMEOUT, "slow"))
CUT_OFF = Trajectory("g000000.1", "t", 1, (make_step(),), 1.0, Status.MAX_STEPS, dropped=DropReason.OVERLONG)


@pytest.mark.parametrize("others", [(), (FAILED,), (CUT_OFF,)])
def test_a_group_of_which_nothing_is_left_makes_room(others: tuple[Trajectory, ...]) -> None:
    """Whatever attempts it has beside that train nothing anyway: their steps are of any version."""
    fresh = [replace(t, steps=(replace(t.steps[0], policy_versions=np.full(2, 3, np.int32)),)) for t in others]
    group = sampled_by(0, 0, 1)
    buffer, discarded = buffer_of(1, "mask_steps")
    buffer.expect(0, 0)
    buffer.put(replace(group, trajectories=(*group.trajectories, *fresh)))
    assert buffer.batch(1, 3) is None
    assert (discarded, buffer.under_way) == ([(0, DropReason.STALE)], 0)


def test_one_waits_for_a_group_whose_last_chance_this_is() -> None:
    buffer, _ = buffer_of(1, "wait")
    buffer.expect(0, 0)
    buffer.expect(1, 1)
    buffer.put(sampled_by(1, 1))
    assert buffer.batch(1, 1) is None  # after this one, version 0 would be two versions old
    buffer.put(sampled_by(0, 0))
    assert indices(buffer.batch(1, 1)) == [0]
    buffer.trained()
    buffer.expect(2, 2)
    buffer.expect(3, 1)
    assert indices(buffer.batch(1, 2)) == [1]  # 3 could be in no better batch


def test_one_waits_for_groups_that_could_not_all_be_trained_in_time_otherwise() -> None:
    """Two of version 0 are left for two updates: a third one must not be trained before."""
    buffer, _ = buffer_of(2, "wait")
    for index in range(3):
        buffer.expect(index, 0)
    buffer.put(sampled_by(0, 0))
    assert indices(buffer.batch(1, 0)) == [0]
    buffer.trained()
    buffer.expect(3, 1)
    buffer.put(sampled_by(3, 1))
    assert buffer.batch(1, 1) is None
    buffer.put(sampled_by(2, 0))
    assert indices(buffer.batch(1, 1)) == [2]
    buffer.trained()
    buffer.put(sampled_by(1, 0))
    assert [indices(buffer.batch(1, version)) for version in (2, 3)] == [[1], [3]]


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 6))
def test_no_live_step_is_older_than_allowed_and_no_other_is_touched(versions: list[list[int]], oldest: int) -> None:
    trajectories = [t for number, own in enumerate(versions) for t in sampled_by(number, *own).trajectories]
    group = make_group(0, *trajectories)
    fresh = without_stale(group, oldest)
    for before, after in zip(group.trajectories, fresh.trajectories, strict=True):
        assert (after.reward, len(after.steps)) == (before.reward, len(before.steps))
        for step, kept in zip(before.steps, after.steps, strict=True):
            assert kept.dropped is (DropReason.STALE if step.policy_versions.min() < oldest else None)
    assert (fresh is group) == all(version >= oldest for own in versions for version in own)
