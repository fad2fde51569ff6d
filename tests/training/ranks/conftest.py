from collections.abc import Iterator

import pytest

from tests.training.ranks.service import Parity
from treadle.training.rank_processes import RankProcesses


@pytest.fixture(scope="session")
def pairs() -> Iterator[list[RankProcesses]]:
    found: list[RankProcesses] = []
    yield found
    for each in found:
        each.close()


@pytest.fixture
def pair(pairs: list[RankProcesses]) -> RankProcesses:
    """Two ranks, which take seconds to start: the ones of the test before, unless it ended them."""
    if not pairs or pairs[-1].over is not None:
        pairs.append(RankProcesses(Parity, 2, limit=300))
    return pairs[-1]
