from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.view.browser import chromium, require_chromium
from tests.view.worlds import record_hostile, record_run
from treadle.view.app import make_app

Get = Callable[..., Any]


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it. Tests only look at it."""
    return record_run(tmp_path_factory.mktemp("view") / "recorded")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose texts are hostile. Tests only look at it."""
    folder = tmp_path_factory.mktemp("hostile")
    return record_hostile(folder / "<b>run</b> \u202e'\"", folder / "tokenizer")


def asking(*paths: Path) -> Get:
    """Return a function that gets a path of the API and returns its JSON."""
    client = TestClient(make_app(paths))

    def get(path: str, status: int = 200, /, **query: Any) -> Any:
        answer = client.get(f"/api/{path}", params=query)
        assert answer.status_code == status, answer.text
        return answer.json()

    return get


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require_chromium()
    with chromium() as made:
        yield made


@pytest.fixture
def get(recorded: Path) -> Get:
    return asking(recorded)
