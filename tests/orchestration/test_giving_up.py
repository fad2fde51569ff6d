from collections import Counter

from tests.worlds import tiny
from treadle.core.types import DropReason
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
