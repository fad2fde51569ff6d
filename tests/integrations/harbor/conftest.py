from collections.abc import Iterator

import pytest

from tests.integrations.libraries import KeptWorkers


@pytest.fixture(scope="session")
def kept() -> Iterator[KeptWorkers]:
    """Of this folder's tests."""
    with KeptWorkers().patched() as kept:
        yield kept
