"""Drawing its picture takes half the time of a tiny run."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _undrawn() -> Iterator[None]:
    """Runs end with an empty picture; tests/cli/test_report.py looks at a real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("treadle.orchestration.train.draw_runs", lambda runs, path: path.touch())
        yield
