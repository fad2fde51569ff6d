from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integrations.libraries import KeptWorkers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps this folder's tests in one process: they look at all sandboxes that it has started."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("harbor"))


@pytest.fixture(scope="session")
def kept() -> Iterator[KeptWorkers]:
    """Of this folder's tests."""
    with KeptWorkers().patched() as kept:
        yield kept
