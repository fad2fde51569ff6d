"""Where the system lets nothing be written, one sentence names the path and the remedy; no number of an error."""

import argparse
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import tiny
from treadle.api.get_model import get_model
from treadle.cli.options import exit_status
from treadle.core.errors import RunError, TreadleError
from treadle.core.files import make_room_in_cache, new_directory, refusal
from treadle.record.run_directory import RunDirectory, make_directory
from treadle.record.trajectory_files import write_trajectories
from treadle.rendering.texts import TokenTexts
from treadle.retrieval.index import _cached
from treadle.training.checkpoint import _writing


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory where nothing can be written, as on a read-only file system."""
    place = tmp_path / "place"
    place.mkdir()

    def guarded(function: Callable[..., Any], writes: Callable[..., bool]) -> Callable[..., Any]:
        def called(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | Path) and str(path).startswith(str(place)) and writes(*args, **kwargs):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return function(path, *args, **kwargs)

        return called

    def opens_to_write(mode: Any = "r", *args: Any, **kwargs: Any) -> bool:
        return mode not in ("r", "rb")

    monkeypatch.setattr(os, "mkdir", guarded(os.mkdir, lambda *args, **kwargs: True))
    monkeypatch.setattr(io, "open", guarded(io.open, opens_to_write))
    monkeypatch.setattr("builtins.open", guarded(open, opens_to_write))
    return place


def in_directory(path: Path) -> None:
    with _writing(path):
        pass


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a run": (lambda place: RunDirectory.create(place / "run", tiny()), r"run'.*; choose another place \(--runs"),
    "a run of any name": (lambda place: make_directory(place, "tiny", 0), "; choose other --runs"),
    "the lock": (lambda place: RunDirectory(place).lock(), "place': .*; make it writable, or continue in a copy"),
    "metrics": (lambda place: RunDirectory(place).log({"update": 1}), "metrics.jsonl: .*make it writable, then --res"),
    "an export": (lambda place: in_directory(place / "out"), "out: .*; choose another place, or make it writable"),
    "traces": (
        lambda place: write_trajectories(place / "t.jsonl", "jsonl", [], TokenTexts(None)),
        r"t\.jsonl: .*; choose",
    ),
    "ATIF": (lambda place: write_trajectories(place / "t", "atif", [], None), "place/t: .*; choose another pl"),  # type: ignore[arg-type]
    "the cache": (lambda place: make_room_in_cache(place / "a" / "b"), r"place/a': .*; set TREADLE_CACHE to a wri"),
    "an index": (lambda place: _cached(place / "a" / "b", lambda path: None), "place/a': .*; set TREADLE_CACHE"),
}


@pytest.mark.parametrize(("write", "remedy"), WRITERS.values(), ids=WRITERS)
def test_a_place_that_takes_nothing(place: Path, write: Callable[[Path], object], remedy: str) -> None:
    with pytest.raises(TreadleError, match=remedy) as refused:
        write(place)
    text = str(refused.value)
    assert "Errno" not in text and text.count("Read-only file system") == 1 and "\n" not in text
    assert ".tmp" not in text


def test_a_converted_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(place / "cache"))
    with pytest.raises(RunError, match=r"could not write to the cache '.*place/cache/models': Read-only"):
        get_model("smollm2", lambda line: None)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "choose another place, or check its permissions"),
        (errno.EACCES, "choose another place, or check its permissions"),
        (errno.EPERM, "choose another place, or check its permissions"),
        (errno.ENOSPC, "free disk space"),
        (errno.EFBIG, "free disk space"),
    ],
)
def test_a_command_that_writes_by_itself(number: int, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: argparse.Namespace) -> int:
        raise OSError(number, os.strerror(number), "/somewhere/.curve.png.tmp")

    assert exit_status(run, argparse.Namespace(), "treadle plot") == 1
    assert capsys.readouterr().err == f"error: /somewhere/curve.png: {os.strerror(number)}; {remedy}\n"


def test_other_errors_of_the_system_are_left_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: argparse.Namespace) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "disk")

    assert exit_status(run, argparse.Namespace(), "treadle plot") == 1
    assert "Input/output error" in capsys.readouterr().err
    assert refusal(OSError("a text alone"), "look") == "a text alone; look"


def test_a_new_directory_is_named_and_not_its_temporary_one(place: Path) -> None:
    with pytest.raises(OSError, match="Read-only"), new_directory(place / "out"):
        pass
