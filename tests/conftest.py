"""Settings shared by all tests. Nothing heavy is imported here."""

import gc
import os
import signal
import sys
from collections import defaultdict
from random import Random
from types import ModuleType

import pytest
from hypothesis import settings

from tests.forks import ForkedProcess
from treadle.workers import child

# Before anything loads torch: one thread a process makes numbers independent of the machine's core count, and
# keeps parallel test processes from fighting over cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Commands that take all cores run beside other tests: threads that spin while they wait would starve each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test depends on the hub; those of models by name serve one themselves.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ranks and engines of this process; those of the processes that tests start are started as ever.
child.Popen = ForkedProcess  # type: ignore[attr-defined]
# Whoever starts the tests in the background may have them ignore Ctrl-C, of which some are.
signal.signal(signal.SIGINT, signal.default_int_handler)

# `make test` takes the profile "quick", with fewer examples where a test does not name a number
settings.register_profile("full", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("full")
settings.register_profile("quick", settings(), max_examples=40)

# What importing and collecting make stays until the end: looking for garbage in it is a third of a test process's time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what `quick(n)` leaves to `make test-all`: all but n variants, drawn by the test's name.

    Slow tests of placement are the cluster's, and run with `make test-cluster`. Folders whose tests share runs or
    sandboxes stay in one process each.
    """
    for item in items:
        if (folder := item.path.parent.name) in ("view", "harbor"):
            item.add_marker(pytest.mark.xdist_group(folder))
        if item.get_closest_marker("slow") and "placement" in item.path.parts:
            item.add_marker(pytest.mark.cluster)
    variants: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("slow"):
            variants[item.nodeid.split("[")[0]].append(item)
    for name, group in variants.items():
        mark = group[0].get_closest_marker("quick")
        assert mark is not None
        group.sort(key=lambda item: item.nodeid)
        for item in Random(name).sample(group, max(0, len(group) - mark.args[0])):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module to put a user's own things into."""
    module = ModuleType("treadle_test_user_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module
