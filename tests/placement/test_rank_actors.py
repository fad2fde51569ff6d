"""Ranks that are actors compute and fail as ranks that are processes."""

from collections.abc import Iterator

import pytest
import torch

from tests.models import random_groups
from tests.training.ranks.service import Case, Parity
from tests.until import CEILING
from treadle.core.errors import RankError, TrainingStopped
from treadle.placement.rank_actors import RankActors
from treadle.placement.reserve import Reservation

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def started(reservation: Reservation) -> Iterator[list[RankActors]]:
    found: list[RankActors] = []
    yield found
    for each in found:
        each.close()


@pytest.fixture
def pair(started: list[RankActors], reservation: Reservation) -> RankActors:
    """Two ranks: the ones of the test before, unless it ended them."""
    if not started or started[-1].over is not None:
        places = [reservation.options(bundle) for bundle in reservation.of("learner rank")]
        started.append(RankActors(Parity, places, limit=CEILING))
    return started[-1]


def test_ranks_compute_as_their_caller_does(pair: RankActors) -> None:
    expected = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), 2
    assert pair.call("settings") == [expected] * 2


def test_the_gradient_is_that_of_one_process(pair: RankActors) -> None:
    for found in pair.call("gradient", Case(random_groups(1))):
        assert found.gradient <= 1e-12
        assert {name: found.metrics[name] for name in found.alone} == pytest.approx(found.alone, rel=1e-9, abs=1e-9)


def test_an_error_of_all_ranks_leaves_them_as_they_are(pair: RankActors) -> None:
    with pytest.raises(TrainingStopped, match=r"rank [01]"):
        pair.call("refuse")
    assert pair.over is None and pair.call("echo", 3) == [(3,), (3,)]


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ("raise", RankError, r"(?s)^learner rank 1 failed with ZeroDivisionError: made up.*in fail"),
        ("die", RankError, r"^learner rank 1 ended: "),
    ],
)
def test_a_rank_that_fails_alone_ends_all_of_them_with_its_own_error(
    pair: RankActors, how: str, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match) as caught:
        pair.call("fail", 1, how)
    print(caught.value)
    with pytest.raises(RankError):
        pair.call("echo")
