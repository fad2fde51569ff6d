"""`make` on a fresh machine, with a Python that only pretends to install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Notes when it begins and ends to make an environment or to install; the `treadle` it installs notes that it trains.
FAKE_PYTHON = """#!{python}
import os, shutil, sys, time
words = sys.argv[1:]
def note(line):
    with open("log", "a") as file:
        file.write(line + "\\n")
def slowly(what):
    note("begin " + what)
    time.sleep(0.5)
    note("end " + what)
if words[:2] == ["-m", "venv"]:
    slowly("venv")
    os.makedirs(words[2] + "/bin")
    shutil.copy(sys.argv[0], words[2] + "/bin/python")
elif words[:2] == ["-m", "pip"]:
    slowly("install " + words[-1])
    with open(".venv/bin/treadle", "w") as file:
        file.write("#!/bin/sh\\necho train >> log\\n")
    os.chmod(".venv/bin/treadle", 0o755)
else:
    os.execv("{python}", ["{python}", *words])
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What set-up needs of a clone."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "python").write_text(FAKE_PYTHON.replace("{python}", sys.executable))
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def start_make(clone: Path, *words: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["make", *words], cwd=clone, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def test_make_demo_twice_at_once_sets_up_once_and_trains_twice(clone: Path) -> None:
    both = [start_make(clone, "demo", "PYTHON=./python") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    log = (clone / "log").read_text().splitlines()
    assert log.count("train") == 2
    expected = [f"{when} {what}" for what in ("venv", "install torch", "install .[train]") for when in ("begin", "end")]
    assert [line for line in log if line != "train"] == expected
    again = start_make(clone, "demo", "PYTHON=./python")
    assert "set-up" not in again.communicate(timeout=60)[0] and again.returncode == 0


def test_an_old_python_is_told_before_anything_is_made(clone: Path) -> None:
    process = start_make(clone, "demo", "PYTHON=false")
    assert "treadle needs Python 3.11 or newer, 'false' is" in process.communicate(timeout=60)[0]
    assert process.returncode == 2 and not (clone / ".venv").exists()
