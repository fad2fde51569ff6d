"""A run is a directory: who owns it, what lies where.

runs/<name>/config.yaml  ledger.sqlite  rollouts/*.parquet  checkpoints/step-000040/  metrics.jsonl  summary.json
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from treadle.core.config import apply_overrides, build, dump_yaml, load_yaml
from treadle.core.errors import RunError
from treadle.core.files import write_atomically
from treadle.orchestration.config import RunConfig


class RunDirectory:
    """Paths of one run, and the lock that its training process holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.ledger_file = path / "ledger.sqlite"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.metrics_file = path / "metrics.jsonl"
        self.summary_file = path / "summary.json"
        self.curve_file = path / "curve.png"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, config: RunConfig) -> RunDirectory:
        """A new run, locked. Raises RunError if the directory holds anything already."""
        run = cls(path)
        try:
            if path.exists() and any(path.iterdir()):
                raise RunError(f"run directory {str(path)!r} is already in use; resume it, or choose another name")
            run.rollouts.mkdir(parents=True)
            run.checkpoints.mkdir()
            run.lock()
            write_atomically(run.config_file, (_versions_header() + dump_yaml(config)).encode())
        except OSError as error:
            raise RunError(f"could not create run directory {str(path)!r}: {error}") from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run, not locked. Raises RunError if there is none."""
        run = cls(path)
        if not run.config_file.is_file():
            raise RunError(f"{str(path)!r} is no run directory: it has no config.yaml")
        return run

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """The resolved configuration it was started with, or goes on with since. Raises ConfigError."""
        return build(RunConfig, apply_overrides(load_yaml(self.config_file), overrides), str(self.config_file))

    def change_config(self, config: RunConfig) -> None:
        """Go on with another configuration; the old one stays as config-1.yaml, config-2.yaml, ..."""
        older = self.path / f"config-{1 + len(list(self.path.glob('config-*.yaml')))}.yaml"
        try:
            write_atomically(older, self.config_file.read_bytes())
            write_atomically(self.config_file, (_versions_header() + dump_yaml(config)).encode())
        except OSError as error:
            raise RunError(f"could not write {self.config_file}: {error}; free disk space, then --resume") from error

    def lock(self) -> None:
        """Claim the run for this process. Raises RunError if another process is training it."""
        file = (self.path / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise RunError(f"another process is training in {str(self.path)!r}; wait for it or stop it") from error
        self._lock = file

    def unlock(self) -> None:
        """Let go of the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def require_space(self, checkpoint_bytes: int, keep: int) -> None:
        """Raise RunError now if the disk could not take `keep` checkpoints and one being written."""
        free, needed = shutil.disk_usage(self.path).free, (keep + 1) * checkpoint_bytes
        if free < needed:
            raise RunError(
                f"{free / 1e6:.0f} MB free at {str(self.path)!r}, {keep + 1} checkpoints need {needed / 1e6:.0f} MB; "
                "free some space, lower orchestration.keep_last or choose another --runs directory"
            )

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        try:
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise RunError(f"could not write {self.metrics_file}: {error}; free disk space, then --resume") from error

    def metrics(self) -> list[dict[str, Any]]:
        """All complete lines of metrics.jsonl."""
        if not self.metrics_file.is_file():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")[:-1]  # an unfinished last line is dropped
        return [json.loads(line) for line in lines]

    def roll_back_metrics(self, update: int) -> None:
        """Forget what was logged after `update`; the resumed run logs it again."""
        kept = [row for row in self.metrics() if row["update"] <= update]
        write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept).encode())


def find_run(runs: Path, recipe: str) -> Path:
    """The newest run of a recipe under `runs` that can go on: not finished, with a checkpoint. Raises RunError."""
    started = [run for run in map(RunDirectory, runs.glob("*")) if any(run.checkpoints.glob("step-*"))]
    unfinished = [run for run in started if run.config_file.is_file() and not run.summary_file.is_file()]
    own = [run for run in unfinished if load_yaml(run.config_file).get("recipe") == recipe]
    if not own:
        raise RunError(f"no unfinished run of {recipe!r} under {str(runs)!r} to resume; start one without --resume")
    return max(own, key=lambda run: run.config_file.stat().st_mtime).path


def default_name(config: RunConfig) -> str:
    """`demo-seed0-20260102-030405`: recipe, seed and the time it was started."""
    return f"{config.recipe}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _versions_header() -> str:
    lines = [f"# python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"]
    for package in ("treadle", "torch", "transformers", "tokenizers", "numpy"):
        try:
            lines.append(f"# {package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"# {package} not installed")
    return "\n".join(lines) + "\n"
