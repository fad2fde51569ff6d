from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.worlds import TINY, Done, PressesCtrlC, playing, record, treadle

_RUNS = {"finished", "stopped", "troubled", "broken"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps this folder's tests that look at the runs below in one process: each run is made once."""
    for item in items:
        if Path(__file__).parent in item.path.parents and _RUNS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("cli_runs"))


@dataclass(frozen=True)
class Place:
    """A folder with a tiny recipe, and runs made with it."""

    path: Path
    cache: Path

    @property
    def recipe(self) -> Path:
        return self.path / "tiny.yaml"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def train(self, *words: object, name: str = "new") -> Done:
        return treadle("train", self.recipe, "--runs", self.runs, "--name", name, *words)


@dataclass(frozen=True)
class Trained:
    """A run that ended, and what its command printed."""

    path: Path
    done: Done
    place: Place


def make_place(path: Path, cache: Path) -> Place:
    (path / "tiny.yaml").write_text(TINY)
    return Place(path, cache)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Warm starts are made once."""
    path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREADLE_CACHE", str(path))
        yield path


@pytest.fixture
def place(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Runs that are made here end with an empty picture: drawing one takes half the time of a tiny run."""
    monkeypatch.setenv("TREADLE_CACHE", str(cache))
    monkeypatch.setattr("treadle.api.run.draw_runs", lambda runs, path: path.touch())
    return make_place(tmp_path, cache)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Trained:
    """A run of four updates. Tests only look at it."""
    place = make_place(tmp_path_factory.mktemp("finished"), cache)
    done = place.train(name="run")
    assert done.status == 0, done.err
    return Trained(place.runs / "run", done, place)


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Trained:
    """A run stopped with Ctrl-C in its third batch. Tests copy it before they change anything."""
    place = make_place(tmp_path_factory.mktemp("stopped"), cache)
    PressesCtrlC.played = 0
    done = place.train(*playing("PressesCtrlC"), "orchestration.updates=6", name="run")
    return Trained(place.runs / "run", done, place)


@pytest.fixture(scope="session")
def troubled(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Trained:
    place = make_place(tmp_path_factory.mktemp("troubled"), cache)
    done = place.train(*playing("FailsNowAndThen", held_out=True), "failures.max_failed_fraction=1.0", name="run")
    assert done.status == 0, done.err
    return Trained(place.runs / "run", done, place)


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run with breaks of every cause. Tests copy it before they change anything."""
    return record(tmp_path_factory.mktemp("broken") / "run")
