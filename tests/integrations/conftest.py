from collections.abc import Iterator

import pytest

from tests.integrations.libraries import KeptWorkers


@pytest.fixture(scope="module")
def kept() -> Iterator[KeptWorkers]:
    """Of this module's tests."""
    with KeptWorkers().patched() as kept:
        yield kept
