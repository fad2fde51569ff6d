"""`treadle new env NAME`: what it writes works as it stands, and nothing is overwritten."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.worlds import files, treadle
from tests.forks import run


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", *words], cwd=folder)


@pytest.mark.slow
def test_the_package_passes_its_own_test_and_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    done = treadle("new", "env", "die")
    assert (done.status, done.err) == (0, "")
    written = {"die/__init__.py", "die/environment.py", "die/recipe.yaml", "die/test_environment.py"}
    assert files(tmp_path).keys() == written
    assert all("skeleton" not in (tmp_path / name).read_text() for name in written)
    tested = command(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "die")
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout
    checked = command(tmp_path, "treadle.cli.main", "train", "die/recipe.yaml", "--dry-run")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    words = ("orchestration.updates=2", "warm_start.steps=2", "data.train.options.count=32", "training.group_size=2")
    trained = command(tmp_path, "treadle.cli.main", "train", "die/recipe.yaml", *words, "--name", "run")
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "runs" / "run" / "summary.json").is_file()


def test_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "die").write_text("mine")
    done = treadle("new", "env", "die")
    assert done.status == 1
    assert "exists already, and is left as it is" in done.error
    assert (tmp_path / "die").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-env", "'my-env' is not a Python package name"),
        ("a/b", "'a/b' is not a Python package name"),
        ("class", "'class' is not a Python package name"),
        ("json", "'json' would hide an installed module"),
        ("treadle", "'treadle' would hide an installed module"),
    ],
)
def test_a_name_that_no_package_can_have_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = treadle("new", "env", name)
    assert done.status == 2
    assert message in done.error
    assert list(tmp_path.iterdir()) == []
