"""A wheel outside a clone: what is in it, and that everything that docs and errors print works as written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.until import CEILING

ROOT = Path(__file__).parents[1]
BRIEF = "orchestration.updates=2 training.tasks_per_update=2 training.group_size=2"
SMALL = f"{BRIEF} warm_start.steps=3 warm_start.max_loss=null"
QUICK = f"{BRIEF} warm_start=null data.held_out=null data.table_by=null rollout.max_completion_tokens=4"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    made = [
        "make",
        "dist",
        f"DIST={folder}",
        f"BUILD_VENV={sys.prefix}",
        f"--old-file={sys.prefix}/.installed",
    ]  # offline
    subprocess.run(made, cwd=ROOT, check=True, capture_output=True)
    assert sorted(path.suffix for path in folder.iterdir()) == [".gz", ".whl"]
    return folder


def only(folder: Path, pattern: str) -> Path:
    [path] = folder.glob(pattern)
    return path


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_the_wheel_holds_the_package_and_the_sdist_a_clone(dist: Path, tmp_path: Path) -> None:
    ours = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(ours, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    with tarfile.open(only(dist, "*.tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
        assert set(tracked) <= names and "PKG-INFO" in names
        sdist.extractall(tmp_path, filter="data")
    with zipfile.ZipFile(only(dist, "*.whl")) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {name.removeprefix("src/") for name in tracked if name.startswith("src/treadle/")}
    again = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again")]
    subprocess.run(again, cwd=only(tmp_path, "treadle-*"), check=True, capture_output=True)
    with zipfile.ZipFile(only(tmp_path / "again", "*.whl")) as wheel:
        assert packed == {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert only(dist, "treadle-*.whl") and "dist/treadle-*.whl)[" in (ROOT / "README.md").read_text()


@dataclass(frozen=True)
class Place:
    """An environment with the wheel, and an empty folder far from the clone."""

    venv: Path
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TREADLE", "VIRTUAL_ENV"))}
        path = f"{self.venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
        locked = {"UV_CONSTRAINT": str(ROOT / "locks" / "treadle.txt"), "VIRTUAL_ENV": str(self.venv)}
        return {**kept, **locked, "PATH": path, "TREADLE_CACHE": str(self.folder / "cache")}

    def run(self, line: str, status: int = 0) -> str:
        """Type it there; returns what it printed, on standard error if it is to fail with this status."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stderr if status else done.stdout

    def run_following_advice(self, line: str) -> list[str]:
        """Type it, and do what the error says; returns what was installed."""
        error = self.run(f"{line} 2>&1 || true")
        installed = self.advice(error)
        for advice in installed:
            self.run(advice)
            self.run(line)
        return installed

    @staticmethod
    def advice(error: str) -> list[str]:
        return re.findall(r"pip install '[^']+'$", error.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def place(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """`pip` is uv's, which takes from its cache what `make` has installed."""
    made = Place(tmp_path_factory.mktemp("venv"), tmp_path_factory.mktemp("far"))
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, made.venv], check=True)
    (made.venv / "bin" / "pip").write_text(f'#!/bin/sh\nexec {uv} pip "$@"\n')
    (made.venv / "bin" / "pip").chmod(0o755)
    made.run(f"pip install --quiet {only(dist, '*.whl')}")
    yield made


@pytest.mark.slow
def test_a_wheel_outside_a_clone(place: Place) -> None:
    """From the bare wheel on, each extra is installed when, and as, an error asks for it."""
    assert place.run("python -c 'import treadle; print(treadle.__file__)'").startswith(str(place.venv))
    assert "arithmetic" in place.run("treadle recipes")
    place.run("treadle recipes show demo")

    arithmetic, agent = f"treadle train arithmetic {SMALL}", f"treadle train lookup_agent {QUICK}"
    assert place.run_following_advice(f"{arithmetic} --name first") == ["pip install 'treadle[train]'"]
    place.run("treadle report runs/first && treadle export runs/first models/first")

    _ask_a_server(place)
    place.run(agent)
    tracked = f"{arithmetic} callbacks=[tensorboard]"
    assert place.run_following_advice(tracked) == ["pip install 'treadle[tensorboard]'"]
    without = place.run(f"{arithmetic} engine.kind=vllm", status=2)
    assert "no vLLM: '.venv-vllm/bin/python' is not an interpreter" in without


def _ask_a_server(place: Place) -> None:
    """Make the call that `treadle serve` advises."""
    serve = ["treadle", "serve", "models/first", "--port", "0", "--max-tokens", "4"]
    server = subprocess.Popen(
        serve, cwd=place.folder, env=place.variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    shown: dict[str, str] = {}
    while "API key" not in shown:
        line = server.stdout.readline()
        assert line, server.communicate()[1]
        shown |= {name: line.split()[2] for name in ("base URL", "API key") if line.startswith(name)}
    try:
        request = urllib.request.Request(
            f"{shown['base URL']}/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": "Where does Anna live?"}]}).encode(),
            {"Authorization": f"Bearer {shown['API key']}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)


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
    time.sleep(0.1)
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


def test_make_dist_installs_nothing_but_what_builds(clone: Path) -> None:
    process = start_make(clone, "dist", "PYTHON=./python")
    output = process.communicate(timeout=CEILING)[0]
    log = [line for line in (clone / "log").read_text().splitlines() if line.startswith("begin")]
    assert log == ["begin venv", "begin install hatchling"], output
    assert not (clone / ".venv").exists()


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
        assert lock.stem.endswith("left-out") or (pins and not unpinned), (lock, unpinned)
        assert "://" not in lock.read_text()
