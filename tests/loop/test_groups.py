"""Which groups make a batch, when, what is left of those that are stale, and which failures stop a run."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.loop.groups import batches_of
from tests.worlds import make_group, make_step, tiny
from treadle.core.errors import Cause
from treadle.core.outcomes import as_trained, without_stale
from treadle.core.types import DropReason, Failure, Group, Status, Trajectory
from treadle.loop.config import StalePolicy
from treadle.loop.failures import fails_by_task
from treadle.loop.groups import Groups
from treadle.loop.stopping import StopConditionMet, WindowStats, check_discard_rate, check_refusal_rate


def sampled_by(index: int, *versions: int) -> Group:
    """A group of one trajectory, with a step of each version."""
    steps = [replace(make_step(), policy_versions=np.full(2, version, np.int32)) for version in versions]
    return make_group(index, Trajectory(f"g{index:06d}.0", "t", 0, tuple(steps), 1.0, Status.DONE))


def indices(batch: list[Group] | None) -> list[int] | None:
    return None if batch is None else [group.index for group in batch]


def live(group: Group) -> list[int]:
    return [len(as_trained(t).steps) for t in group.trajectories]


def started(staleness: int, policy: StalePolicy, size: int, *versions: int) -> Groups:
    """Groups that are being sampled, each started at one of the versions; `size` make a batch."""
    section = f"orchestration.max_staleness={staleness}", f"orchestration.stale_policy={policy}"
    groups = batches_of(size, *section)
    for index, version in enumerate(versions):
        groups.start(make_group(index), version)
    return groups


def test_the_oldest_come_first_and_a_batch_is_in_order_of_submission() -> None:
    groups = started(3, "mask_steps", 2, 1, 0, 0, 1)
    assert (groups.sampling, groups.under_way, groups.take(1)) == (4, 4, None)
    for index in (0, 2, 1):
        groups.finish(sampled_by(index, 1))
    assert indices(groups.take(1)) == [1, 2]
    assert (groups.outstanding, groups.under_way) == ((0, 3), 4)  # until what was taken is published
    groups.trained()
    assert groups.under_way == 2


@pytest.mark.parametrize(
    ("policy", "expected", "left", "remaining"), [("mask_steps", [0, 1], [[2], [1]], 2), ("drop_group", None, [], 1)]
)
def test_what_is_stale(policy: StalePolicy, expected: Any, left: Any, remaining: int) -> None:
    groups = started(1, policy, 2, 0, 0)
    groups.finish(sampled_by(0, 2, 3))
    groups.finish(sampled_by(1, 1, 2))
    groups.drop_stale(3)
    batch = groups.take(3)
    assert (indices(batch), [live(group) for group in batch or ()], groups.under_way) == (expected, left, remaining)


FAILED = Trajectory("g000000.1", "t", 1, (make_step(),), None, Status.FAILED, Failure(Cause.TIMEOUT, "slow"))
CUT_OFF = Trajectory("g000000.1", "t", 1, (make_step(),), 1.0, Status.MAX_STEPS, dropped=DropReason.OVERLONG)


@pytest.mark.parametrize("others", [(), (FAILED,), (CUT_OFF,)])
def test_a_group_of_which_nothing_is_left_makes_room(others: tuple[Trajectory, ...]) -> None:
    """Whatever attempts it has beside that train nothing anyway: their steps are of any version."""
    fresh = [replace(t, steps=(replace(t.steps[0], policy_versions=np.full(2, 3, np.int32)),)) for t in others]
    group = sampled_by(0, 0, 1)
    groups = started(1, "mask_steps", 1, 0)
    groups.finish(replace(group, trajectories=(*group.trajectories, *fresh)))
    groups.drop_stale(3)
    assert (groups.take(3), groups.under_way) == (None, 0)


def test_one_waits_for_a_group_whose_last_chance_this_is() -> None:
    groups = started(1, "wait", 1, 0, 1)
    groups.finish(sampled_by(1, 1))
    assert groups.take(1) is None  # after this one, version 0 would be two versions old
    groups.finish(sampled_by(0, 0))
    assert indices(groups.take(1)) == [0]
    groups.trained()
    groups.start(make_group(2), 2)
    groups.start(make_group(3), 1)
    assert indices(groups.take(2)) == [1]  # 3 could be in no better batch


def test_one_waits_for_groups_that_could_not_all_be_trained_in_time_otherwise() -> None:
    """Two of version 0 are left for two updates: a third one must not be trained before."""
    groups = started(2, "wait", 1, 0, 0, 0)
    groups.finish(sampled_by(0, 0))
    assert indices(groups.take(0)) == [0]
    groups.trained()
    groups.start(make_group(3), 1)
    groups.finish(sampled_by(3, 1))
    assert groups.take(1) is None
    groups.finish(sampled_by(2, 0))
    assert indices(groups.take(1)) == [2]
    groups.trained()
    groups.finish(sampled_by(1, 0))
    batches = []
    for version in (2, 3):
        batches.append(indices(groups.take(version)))
        groups.trained()
    assert batches == [[1], [3]]


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


def test_a_step_of_several_versions_is_as_stale_as_its_oldest_token() -> None:
    [trajectory] = sampled_by(0, 0).trajectories
    step = replace(trajectory.steps[0], policy_versions=np.array([1, 3], np.int32))
    group = make_group(0, replace(trajectory, steps=(step,)))
    [marked] = without_stale(group, 2).trajectories
    assert marked.steps[0].dropped is DropReason.STALE
    assert without_stale(group, 1) is group


def test_groups_that_wait_for_a_straggler_do_not_count_as_discarded() -> None:
    """With stale_policy=wait there may be many; batches are of two, and at most 16 groups are sampled for one."""
    config = tiny("failures.max_sampled=8")

    def check(groups: int, discarded: int) -> None:
        check_discard_rate(
            WindowStats(groups=groups, discarded=Counter({DropReason.FILTERED: discarded})), config.loop, update=3
        )

    check(groups=20, discarded=0)
    check(groups=20, discarded=14)
    check(groups=15, discarded=15)
    with pytest.raises(StopConditionMet, match=r"^16 groups were sampled for update 3, which needs 2; discarded: 15 f"):
        check(groups=16, discarded=15)


def test_what_was_retried_makes_no_refusal_count_less() -> None:
    """Two groups of three: each place counts once."""
    check_refusal_rate({str(n): "empty" for n in range(3)}, tiny().loop, update=1)
    with pytest.raises(StopConditionMet, match=r"^4 of 6 trajectories of update 1 could not be trained"):
        check_refusal_rate({str(n): "empty" for n in range(4)}, tiny().loop, update=1)


ENGINE, ENVIRONMENT = Cause.ENGINE, Cause.ENVIRONMENT


@pytest.mark.parametrize(
    ("ends", "blamed"),
    [
        ([None, None, None], False),
        ([ENVIRONMENT, ENVIRONMENT, None], True),
        ([ENVIRONMENT, ENGINE, None], False),
        ([ENGINE, ENGINE, ENGINE], False),
        ([ENVIRONMENT, ENVIRONMENT, ENGINE], True),
        ([ENGINE, ENGINE, ENGINE, ENVIRONMENT, ENVIRONMENT, None], True),  # made again, and failed by themselves
        ([ENVIRONMENT, ENVIRONMENT, None, ENGINE, None], False),
    ],
)
def test_a_group_counts_against_its_task_if_the_task_failed_it(ends: list[Cause | None], blamed: bool) -> None:
    """Groups of three places, of which two must be graded; later attempts are made in the place of earlier ones."""
    played = [
        Trajectory(f"g.{n}", "t", n, (), 0.0, Status.DONE)
        if cause is None
        else Trajectory(f"g.{n}", "t", n, (), None, Status.FAILED, Failure(cause, "x"))
        for n, cause in enumerate(ends)
    ]
    assert fails_by_task(make_group(0, *played), size=3, least=2) == blamed
