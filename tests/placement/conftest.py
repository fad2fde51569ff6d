import os
from collections.abc import Iterator

import pytest

from treadle.placement.cluster import connected
from treadle.placement.reserve import Bundle, Reservation, Role, reserve

os.environ.setdefault("RAY_worker_niceness", "0")  # else they wait for the tests that run beside them, vLLM for minutes

ROLES: tuple[Role, ...] = ("learner rank", "engine", "rollout worker")
BUNDLES = [Bundle(role, number, {"CPU": 1}) for role in ROLES for number in range(2)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local cluster of this module's tests, with six CPUs on any machine. Only slow tests start Ray: it gives its own
    processes 30 seconds, whatever else the machine does.
    """
    with connected(None, BUNDLES, lambda line: None):
        yield


@pytest.fixture(scope="module")
def reservation(cluster: None) -> Iterator[Reservation]:
    with reserve(BUNDLES, 60) as reserved:
        yield reserved
