"""`treadle train RECIPE --dry-run`: what it prints, its exit status, and that it leaves nothing behind."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Place
from tests.cli.worlds import ROOT, files, treadle
from tests.fake_hub import serving_hub


def test_it_shows_prompt_memory_and_checks_and_leaves_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    before = files(tmp_path)
    done = treadle("train", place.recipe, "--dry-run")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("first prompt, task ") and lines[0].endswith(" tokens")
    assert lines[1] == "<|im_start|>user" and "<|im_start|>assistant" in lines
    assert any(line.startswith("AdamW's moments") for line in lines)
    checks = [line.split()[0] for line in lines[-9:]]
    assert checks == ["settings", "data", "tokenizer", "model", "engine", "first", "warm", "memory", "disk"]
    assert files(tmp_path) == before and not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()


def test_what_is_missing_makes_the_status_1_and_has_a_line(place: Place) -> None:
    done = treadle("train", place.recipe, "--dry-run", "callbacks=[typo]", "data.held_out.source=nowhere.jsonl")
    assert done.status == 1
    missing = [line for line in done.out.splitlines() if line.split()[1:2] == ["missing"]]
    assert [line.split()[0] for line in missing] == ["data", "callbacks"]


def test_wrong_input_has_status_2_as_ever(place: Place) -> None:
    assert treadle("train", place.recipe, "--dry-run", "updates=5").status == 2
    done = treadle("train", place.recipe, "--dry-run", "--resume")
    assert done.status == 2
    assert done.error == "error: --dry-run is for a new run; leave out --resume, or --dry-run"


@pytest.mark.slow
def test_nothing_is_downloaded(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub has the model; without --dry-run it would be fetched."""
    folder = tmp_path / "served"
    shutil.copytree(ROOT / "src" / "treadle" / "recipes" / "tokenizer", folder)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with serving_hub("org/model", folder) as (endpoint, asked):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        words = ("train", place.recipe, "--dry-run", "model.tokenizer=org/model")
        # not forked: the hub's client reads these variables when it is imported
        command = [sys.executable, "-m", "treadle.cli.main", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert asked == []
    assert done.returncode == 1
    assert "treadle models get org/model" in done.stdout
    assert "HF_HUB_OFFLINE" not in os.environ
