from collections import Counter

import pytest

from tests.worlds import make_group, tiny
from treadle.core.errors import Cause
from treadle.core.types import DropReason, Failure, Status, Trajectory
from treadle.orchestration.failures import fails_by_task
from treadle.orchestration.giving_up import Since, too_many_discarded


def test_groups_that_wait_for_a_straggler_do_not_count_as_discarded() -> None:
    """With late=wait there may be many; batches are of two, and at most 16 groups are sampled for one."""
    config = tiny("orchestration.max_sampled=8")

    def reason(groups: int, discarded: int) -> str | None:
        return too_many_discarded(Since(groups=groups, discarded=Counter({DropReason.FILTERED: discarded})), config, 3)

    assert reason(groups=20, discarded=0) is None
    assert reason(groups=20, discarded=14) is None
    assert reason(groups=15, discarded=15) is None
    found = reason(groups=16, discarded=15)
    assert found and found.startswith("16 groups were sampled for update 3, which needs 2; discarded: 15 filtered")


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
