"""A run is a directory: who owns it, what lies where.

runs/<name>/config.yaml  ledger.sqlite  rollouts/*.parquet  checkpoints/step-000040/  metrics.jsonl  summary.json
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from treadle.core.config import build, dump_yaml, load_yaml
from treadle.core.errors import RunError
from treadle.core.files import write_atomically
from treadle.orchestration.config import RunConfig


@dataclass(frozen=True, slots=True)
class MetricsLog:
    """What metrics.jsonl holds.

    rows: of the lines that can be read, in order. unreadable: the numbers of the other lines, from 1.
    """

    rows: list[dict[str, Any]]
    unreadable: list[int]

    def problem(self, updates: int) -> str | None:
        """Return in a sentence what is damaged, or missing of updates 1 to `updates`; None if nothing is."""
        logged = {row["update"] for row in self.rows if row["kind"] == "update"}
        missing = [update for update in range(1, updates + 1) if update not in logged]
        said = [f"cannot be read in line {_listed(self.unreadable)}"] if self.unreadable else []
        said += [f"has no line of update {_listed(missing)}"] if missing else []
        return f"metrics.jsonl {' and '.join(said)}" if said else None


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
        except FileExistsError as error:  # by another process, just now
            raise RunError(f"run directory {str(path)!r} is already in use; choose another name") from error
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
        return build(RunConfig, load_yaml(self.config_file), str(self.config_file), overrides)

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

    def metrics_log(self) -> MetricsLog:
        """Read metrics.jsonl. A last line that a kill left unfinished is none."""
        if not self.metrics_file.is_file():
            return MetricsLog([], [])
        lines = self.metrics_file.read_bytes().split(b"\n")[:-1]
        rows = dict(enumerate(map(_metrics_row, lines), 1))
        return MetricsLog(
            [row for row in rows.values() if row is not None], [n for n, row in rows.items() if row is None]
        )

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl that can be read."""
        return self.metrics_log().rows

    def roll_back_metrics(self, update: int, evaluations: Sequence[Mapping[str, Any]]) -> str | None:
        """Forget what was logged after a checkpoint; the resumed run logs it again.

        update: of the checkpoint. evaluations: those in its state; one that was made after it is forgotten though its
        update is not. Returns what is damaged or missing, in a sentence.
        """
        log = self.metrics_log()
        made = [{"kind": "evaluation", **row} for row in evaluations]
        kept = [row for row in log.rows if row["kind"] == "update" and row["update"] <= update] + made
        kept.sort(key=lambda row: (row["update"], row["kind"] == "evaluation"))
        write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept).encode())
        return log.problem(update)


def _metrics_row(line: bytes) -> dict[str, Any] | None:
    """None for a line that the run did not write."""
    try:
        row = json.loads(line.decode())
    except ValueError:
        return None
    known = isinstance(row, dict) and row.get("kind") in ("update", "evaluation") and isinstance(row.get("update"), int)
    return row if known else None


def _listed(numbers: Sequence[int], most: int = 5) -> str:
    """`3, 4, 9`, or `1, 2, 3, 4, 5 and 7 more`."""
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def find_run(runs: Path, recipe: str) -> Path:
    """The newest run of a recipe under `runs` that can go on: not finished, with a checkpoint. Raises RunError."""
    started = [run for run in map(RunDirectory, runs.glob("*")) if any(run.checkpoints.glob("step-*"))]
    unfinished = [run for run in started if run.config_file.is_file() and not run.summary_file.is_file()]
    own = [run for run in unfinished if load_yaml(run.config_file).get("recipe") == recipe]
    if not own:
        raise RunError(f"no unfinished run of {recipe!r} under {str(runs)!r} to resume; start one without --resume")
    return max(own, key=lambda run: run.config_file.stat().st_mtime).path


def make_directory(runs: Path, config: RunConfig) -> Path:
    """Make and return an empty directory for a run: `runs/demo-seed0-20260102-030405`, of recipe, seed and time.

    Whoever starts in the same second, in whatever process, gets `...-2`, `...-3`. Raises RunError.
    """
    name = f"{config.recipe}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    while True:
        path = runs / next(names)
        try:
            path.mkdir(parents=True)
            return path
        except OSError as error:
            if not path.is_dir():
                what = error.strerror or error
                raise RunError(f"could not create run directory {str(path)!r}: {what}; choose other --runs") from error


def _versions_header() -> str:
    lines = [f"# python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"]
    for package in ("treadle", "torch", "transformers", "tokenizers", "numpy"):
        try:
            lines.append(f"# {package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"# {package} not installed")
    return "\n".join(lines) + "\n"
