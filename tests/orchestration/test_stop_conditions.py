from collections import Counter

import pytest

from tests.worlds import make_group, tiny
from treadle.core.errors import Cause
from treadle.core.types import DropReason, Failure, Status, Trajectory
from treadle.orchestration.sampling.failures import fails_by_task
from treadle.orchestration.stopping import (
    StopConditionMet,
    WindowStats,
    check_discard_rate,
    check_refusal_rate,
)


def test_groups_that_wait_for_a_straggler_do_not_count_as_discarded() -> None:
    """With stale_policy=wait there may be many; batches are of two, and at most 16 groups are sampled for one."""
    config = tiny("failures.max_sampled=8")

    def check(groups: int, discarded: int) -> None:
        check_discard_rate(
            WindowStats(groups=groups, discarded=Counter({DropReason.FILTERED: discarded})), config, update=3
        )

    check(groups=20, discarded=0)
    check(groups=20, discarded=14)
    check(groups=15, discarded=15)
    with pytest.raises(StopConditionMet, match=r"^16 groups were sampled for update 3, which needs 2; discarded: 15 f"):
        check(groups=16, discarded=15)


def test_what_was_retried_makes_no_refusal_count_less() -> None:
    """Two groups of three: each place counts once."""
    check_refusal_rate({str(n): "empty" for n in range(3)}, tiny(), update=1)
    with pytest.raises(StopConditionMet, match=r"^4 of 6 trajectories of update 1 could not be trained"):
        check_refusal_rate({str(n): "empty" for n in range(4)}, tiny(), update=1)


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
