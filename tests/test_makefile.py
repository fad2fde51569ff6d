"""`make` on a fresh machine, with a Python that only pretends to install."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.until import CEILING

ROOT = Path(__file__).resolve().parent.parent

# Notes when it begins and ends to make an environment or to install; installs itself as uv, too, and a `treadle` that
# notes that it trains.
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
    open(words[2] + "/pyvenv.cfg", "w").close()
    shutil.copy(sys.argv[0], words[2] + "/bin/python")
elif words == ["-m", "pip", "--version"] or "(3, 12) <= sys.version_info" in words[-1]:
    pass
elif words[:2] == ["-m", "pip"] or words[:2] == ["pip", "install"]:
    slowly("install " + words[-1])
    if os.path.exists(".venv"):
        if words[0] == "-m":
            shutil.copy(sys.argv[0], ".venv/bin/uv")
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
    for name in ("scripts", "locks"):
        shutil.copytree(ROOT / name, tmp_path / name)
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
    outputs = [process.communicate(timeout=CEILING)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    log = (clone / "log").read_text().splitlines()
    assert log.count("train") == 2
    expected = [
        f"{when} {what}" for what in ("venv", "install uv>=0.13", "install .[train]") for when in ("begin", "end")
    ]
    assert [line for line in log if line != "train"] == expected
    again = start_make(clone, "demo", "PYTHON=./python")
    assert "set-up" not in again.communicate(timeout=CEILING)[0] and again.returncode == 0


def test_an_old_python_is_told_before_anything_is_made(clone: Path) -> None:
    process = start_make(clone, "demo", "PYTHON=false")
    assert "treadle needs Python 3.11 or newer, 'false' is" in process.communicate(timeout=CEILING)[0]
    assert process.returncode == 2 and not (clone / ".venv").exists()


def test_libraries_get_pythons_of_their_own_which_keep_what_else_is_in_them(clone: Path) -> None:
    """They are made once; a lock that is newer is installed into what is there."""

    def made() -> list[str]:
        process = start_make(clone, "verifiers-env", "PYTHON=./python", "LIBRARY_PYTHON=./python", *places)
        output = process.communicate(timeout=CEILING)[0]
        assert process.returncode == 0, output
        log = (clone / "log").read_text().splitlines()
        (clone / "log").write_text("")
        return [line for line in log if line.startswith("begin")]

    places = ("VERIFIERS_VENV=own", "VERIFIERS_CLASSIC_VENV=other")
    own, other = "begin install locks/verifiers.txt", "begin install locks/verifiers-classic.txt"
    assert made() == ["begin venv", "begin install uv>=0.13", "begin venv", own, "begin venv", other]
    assert made() == []
    (clone / "own" / "an_environment").touch()
    os.utime(clone / "locks" / "verifiers.txt", (2**32, 2**32))
    assert made() == [own]
    assert (clone / "own" / "an_environment").exists()


def test_locks_pin_every_package_and_name_no_place() -> None:
    for lock in (ROOT / "locks").glob("*.txt"):
        pins = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
        unpinned = [pin for pin in pins if not re.match(r"[\w.-]+(\[[\w,-]+\])?==[\w.+!]+( ;|$)", pin)]
        assert lock.stem == "vllm-left-out" or (pins and not unpinned), (lock, unpinned)
        assert "://" not in lock.read_text()
