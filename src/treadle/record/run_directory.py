"""The directory of a run: its files and its lock.

runs/<name>/config.yaml  ledger.sqlite  rollouts/*.parquet  traces/*.parquet  checkpoints/step-000040/
            metrics.jsonl  intervals.jsonl  status.json  summary.json

`treadle serve --record` and `treadle eval --dump` write runs without checkpoints, marked by recording.txt.
"""

from __future__ import annotations

import difflib
import fcntl
import itertools
import json
import os
import platform
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from treadle.core.config import Config, dump_yaml, parse_yaml
from treadle.core.errors import DamageError, RunError
from treadle.core.files import WrittenFile, refusal, sha256_of, write_atomically
from treadle.core.text import checked_json, is_unfinished, parse_checked_json
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import LEDGER, SCHEMA_VERSION, LedgerReader, other_version, salvage

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LOCK_ATTEMPTS = 5
_FIRST = "step-000000"  # checkpoint
_LEFTOVERS = (
    *("warm_start.json", "intervals.jsonl", "metrics.jsonl"),
    *("rollouts/*", "rollouts/.*", "checkpoints/*", "checkpoints/.*", "ledger.sqlite*"),
)
"""Files of an unsaved run, which a new one would extend. The ledger goes last: records without a ledger are kept."""


@dataclass(frozen=True, slots=True)
class JsonLog:
    """Content of metrics.jsonl or intervals.jsonl. unreadable: numbers of lines missing in `rows`, from 1."""

    rows: list[dict[str, Any]]
    unreadable: list[int]

    @classmethod
    def read(cls, path: Path) -> JsonLog:
        """Read all lines, except an incomplete last one left by a killed process."""
        *lines, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
        rows = dict(enumerate(map(parse_checked_json, lines if is_unfinished(last) else [*lines, last]), 1))
        return cls([row for row in rows.values() if row is not None], [n for n, row in rows.items() if row is None])

    def problem(self, updates: int) -> str | None:
        """Describe damage, or missing updates of 1 to `updates`; None if there is none."""
        logged = {row["update"] for row in self.rows if row["kind"] == "update"}
        missing = [update for update in range(1, updates + 1) if update not in logged]
        problems = [f"cannot be read in line {_listed(self.unreadable)}"] if self.unreadable else []
        problems += [f"has no line of update {_listed(missing)}"] if missing else []
        return f"metrics.jsonl {' and '.join(problems)}" if problems else None


def without_version(data: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a run's config.yaml without `schema_version`. source: file name. Raises RunError for another version."""
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise other_version(f"{source}: the run", version)
    return {key: value for key, value in data.items() if key != "schema_version"}


def no_run(address: str | Path) -> RunError:
    """Return why `RUN` or `RUN@CHECKPOINT` addresses no run, with a similar name beside it."""
    path = Path(address)
    if not path.exists():
        path = Path(str(address).rpartition("@")[0] or address)
    if path.exists():
        if path.is_file() and path.suffix in (".jsonl", ".parquet"):
            return RunError(
                f"{str(path)!r} is a file, not a run directory; treadle sft --from and treadle.load_run read it"
            )
        return RunError(f"{str(path)!r} is not a run directory: it has no config.yaml")
    runs = [config.parent.name for config in path.parent.glob("*/config.yaml")]
    near = difflib.get_close_matches(path.name, runs, n=1)
    meant = f"; did you mean {str(path.with_name(near[0]))!r}?" if near else f" in {path.parent.absolute()}"
    return RunError(f"{str(path)!r} is not a run directory: there is nothing of that name{meant}")


class RunDirectory:
    """Paths of one run, and the lock of its training process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.ledger_file = path / LEDGER
        self.rollouts = path / "rollouts"
        self.traces = path / "traces"
        self.checkpoints = path / "checkpoints"
        self.metrics_file = path / "metrics.jsonl"
        self.status_file = path / "status.json"
        self.intervals_file = path / "intervals.jsonl"
        self.summary_file = path / "summary.json"
        self.curve_file = path / "curve.png"
        self.recording_file = path / "recording.txt"  # of a run of trajectories that are not trained
        self.tokenizer_file = path / "tokenizer.json"  # of the same; none if they are text
        self.written: list[WrittenFile] = []  # files written by this process, for the ledger
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """Create a new run's directory and lock it. Raises RunError as `check_free`."""
        run = cls(path)
        run.check_free()
        try:
            begun = run.is_unsaved
            for folder in (run.rollouts, run.traces, run.checkpoints):
                folder.mkdir(parents=True, exist_ok=begun)
            run.lock()
            if begun and not run.is_unsaved:
                raise FileExistsError
            for leftover in (file for pattern in _LEFTOVERS if begun for file in path.glob(pattern)):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            run.write(run.config_file.name, _config_content(config))
        except FileExistsError as error:  # just created by another process
            raise RunError(f"run directory {str(path)!r} is already in use; choose another name") from error
        except OSError as error:
            elsewhere = "choose another place (--runs, in Python run=)"
            raise RunError(f"could not create run directory {str(path)!r}: {refusal(error, elsewhere)}") from error
        return run

    @classmethod
    def create_recorded(cls, path: Path, config: Config, by: str, tokenizer: Tokenizer | None = None) -> RunDirectory:
        """Create and lock a run of trajectories that are not trained. by: command. tokenizer: None for text.

        Raises RunError as `check_free`.
        """
        run = cls.create(path, config)
        try:
            if tokenizer is not None:
                run.write(run.tokenizer_file.name, tokenizer.to_str().encode())
            run.write(run.recording_file.name, by.encode())
        except OSError as error:
            raise RunError(f"could not create run directory {str(path)!r}: {refusal(error)}") from error
        return run

    @property
    def is_text(self) -> bool:
        """Return whether its trajectories are text without ids."""
        return self.recording_file.is_file() and not self.tokenizer_file.is_file()

    @property
    def has_checkpoint(self) -> bool:
        return bool(self._steps())

    @property
    def is_unsaved(self) -> bool:
        """Return whether a run here has no recorded checkpoint, so that it starts over.

        It may have made its first evaluation, and written the directory of its first checkpoint, but no training
        samples. Raises RunError or DamageError for an unreadable ledger.
        """
        later = {step.name for step in self._steps()} - {_FIRST}
        if self.summary_file.exists() or self.recording_file.exists() or later:
            return False
        if self.is_stub or not ((self.path / "lock").is_file() and self.ledger_file.is_file()):
            return self.is_stub
        ledger = self.ledger()
        return ledger.latest_checkpoint() is None and not ledger.times_sampled()

    @property
    def is_stub(self) -> bool:
        """Return whether a run here has recorded nothing: its process may have been killed in a warm start."""
        folders = (self.rollouts, self.traces, self.checkpoints)
        if not (self.path / "lock").is_file() or not all(folder.is_dir() for folder in folders):
            return False
        recorded = (*self.rollouts.glob("*.parquet"), *self._steps(), self.metrics_file, self.summary_file)
        return not any(path.exists() for path in recorded)

    def _steps(self) -> list[Path]:
        return list(self.checkpoints.glob("step-*"))

    def check_free(self) -> None:
        """Raise RunError, with the remedy, unless the path is free for a run: missing, or an unsaved run."""
        what = f"run directory {str(self.path)!r}"
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise RunError(f"could not create {what}: it is a file; choose another name")
        if self.state() == "in progress":
            raise self._in_progress()
        if self.is_unsaved or not any(self.path.iterdir()):
            return
        advice = ""
        if self._steps():
            advice = "resume it (--resume, in Python resume=True), or "
        elif self.config_file.is_file():
            advice = "it has no checkpoint to resume: delete it, or "
        raise RunError(f"{what} is already in use; {advice}choose another name")

    def _in_progress(self) -> RunError:
        doing = "recording" if self.recording_file.is_file() else "training"
        return RunError(f"another process is {doing} in {str(self.path)!r}; wait for it or stop it")

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run without locking it. Raises RunError if there is none."""
        run = cls(path)
        if not run.config_file.is_file():
            raise no_run(path)
        return run

    def write(self, name: str, content: bytes) -> None:
        """Write a file, and add its SHA-256 to `written`, for the ledger. Raises OSError."""
        self.written.append(WrittenFile(name, write_atomically(self.path / name, content)))

    def ledger(self) -> LedgerReader:
        """Return a reader of the ledger. Raises RunError, with the remedy, if there is none."""
        if not self.ledger_file.is_file():
            if self._steps():
                raise RunError(f"run {str(self.path)!r} has no ledger any more; {salvage(self.path)}")
            raise RunError(f"run {str(self.path)!r} has recorded nothing yet: it is, or was stopped, in its warm start")
        return LedgerReader(self.ledger_file)

    def began(self) -> datetime | None:
        """Return the date of the run, for its templates. None before its first checkpoint."""
        latest = self.ledger().latest_checkpoint() if self.ledger_file.is_file() else None
        return datetime.fromisoformat(latest[1].began) if latest and latest[1].began else None

    def config_data(self) -> dict[str, Any]:
        """Return the content of config.yaml, not validated.

        Raises DamageError if it differs from the ledger's record, RunError for a run of another version of Treadle.
        """
        content = self.config_file.read_bytes()
        # config.yaml or a version before a change: the process may have died during a change, or while making the
        # ledger.
        known = self.ledger_file.is_file() and not self.is_stub
        recorded = self.ledger().files("config").values() if known else ()
        if recorded and sha256_of(content) not in {file.sha256 for file in recorded}:
            raise DamageError(
                f"{self.config_file} is damaged, or was changed by hand: restore it; allowed changes are made on the "
                "command line (treadle train RECIPE --resume key.path=value)"
            )
        source = str(self.config_file)
        return without_version(parse_yaml(content, source), source)

    def change_config(self, config: Config, ledger: Ledger) -> None:
        """Replace the run's configuration; the old one stays as config-1.yaml, config-2.yaml, ..."""
        older = f"config-{1 + len(list(self.path.glob('config-*.yaml')))}.yaml"
        before, after = self.config_file.read_bytes(), _config_content(config)
        named = {older: before, self.config_file.name: after}
        ledger.note_files(WrittenFile(name, sha256_of(content)) for name, content in named.items())
        ledger.copy_out()
        try:
            for name, content in named.items():
                write_atomically(self.path / name, content)
        except OSError as error:
            raise RunError(
                f"could not write {self.config_file}: {refusal(error, 'make it writable')}, then --resume"
            ) from error

    def lock(self) -> None:
        """Claim the run for this process. Raises RunError if another process is training it."""
        try:
            file = (self.path / "lock").open("a+")
        except IsADirectoryError as error:
            raise RunError(f"{self.path / 'lock'} is a directory, and must be a file or missing; remove it") from error
        except OSError as error:
            elsewhere = "make it writable, or continue in a copy of the run"
            raise RunError(f"could not lock run directory {str(self.path)!r}: {refusal(error, elsewhere)}") from error
        for attempts_left in reversed(range(_LOCK_ATTEMPTS)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                # Held by another run, or briefly by a reader: `state`.
                if not attempts_left:
                    file.close()
                    raise self._in_progress() from error
                time.sleep(0.02)
        self._lock = file

    @property
    def has_summary(self) -> bool:
        try:
            return isinstance(json.loads(self.summary_file.read_bytes()), dict)
        except (OSError, ValueError):
            return False

    def state(self) -> str:
        """Return `finished`, `in progress` (a process holds the lock), `stopped`, or `recorded`: not trained."""
        if self.recording_file.is_file():
            return "recorded"
        if self.has_summary:
            return "finished"
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, IsADirectoryError):
            return "stopped"
        except BlockingIOError:
            return "in progress"
        return "stopped"

    @property
    def no_checkpoint(self) -> str:
        """Why the run has no recorded checkpoint, and the remedy, for an error message."""
        if self._steps():
            return f"has no recorded checkpoint, only directories; {salvage(self.path)}"
        if self.recording_file.is_file():
            return "has recorded trajectories, but no checkpoint; name another run, a recipe or a model directory"
        return "has no checkpoint yet: --resume starts it over"

    @property
    def resume_command(self) -> str:
        """`treadle train runs/demo --resume`, quoted for a shell."""
        return shlex.join(["treadle", "train", str(self.path), "--resume"])

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def log(self, row: Mapping[str, Any]) -> None:
        _append(self.metrics_file, row)

    def rewrite_log(self, rows: Iterable[Mapping[str, Any]]) -> None:
        _write(self.metrics_file, rows)

    def log_interval(self, row: Mapping[str, Any]) -> None:
        _append(self.intervals_file, row)

    def intervals(self) -> list[dict[str, Any]]:
        return JsonLog.read(self.intervals_file).rows

    def metrics(self) -> list[dict[str, Any]]:
        return self.metrics_log().rows

    def metrics_log(self) -> JsonLog:
        return JsonLog.read(self.metrics_file)

    def roll_back_metrics(self, update: int, evaluations: Sequence[Mapping[str, Any]]) -> str | None:
        """Remove lines of metrics.jsonl and intervals.jsonl logged after a checkpoint; they will be logged again.

        update: update of the checkpoint. evaluations: evaluations in its state; others are removed, even of this
        update. Returns `JsonLog.problem`.
        """
        log = self.metrics_log()
        kept = [row for row in log.rows if row["kind"] == "update" and row["update"] <= update]
        kept += [{"kind": "evaluation", **row} for row in evaluations]
        kept.sort(key=lambda row: (row["update"], row["kind"] == "evaluation"))
        _write(self.metrics_file, kept)
        _write(self.intervals_file, [row for row in self.intervals() if row["update"] <= update])
        return log.problem(update)


def _append(path: Path, row: Mapping[str, Any]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(checked_json(row) + "\n")
    except OSError as error:
        raise RunError(f"could not write {path}: {refusal(error, 'make it writable')}, then --resume") from error


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_atomically(path, "".join(checked_json(row) + "\n" for row in rows).encode())


def _listed(numbers: Sequence[int], limit: int = 5) -> str:
    more = f" and {len(numbers) - limit} more" if len(numbers) > limit else ""
    return ", ".join(map(str, numbers[:limit])) + more


def find_run(runs: Path, recipe: str) -> Path:
    """Return the newest resumable run of a recipe: not finished, with a recorded checkpoint, or unsaved.

    Raises RunError.
    """
    begun = [run for run in map(RunDirectory, runs.glob("*")) if run.config_file.is_file() and not run.has_summary]
    try:
        unfinished = [run for run in begun if any(run.checkpoints.glob("step-*")) or run.is_unsaved]
        candidates = [run for run in unfinished if run.config_data().get("recipe") == recipe]
        ready = [run for run in candidates if run.is_unsaved or run.ledger().latest_checkpoint() is not None]
    except RunError as error:
        raise type(error)(f"{error}; another run is chosen with --name") from error
    if not ready:
        others = "".join(f"; {str(run.path)!r} {run.no_checkpoint}" for run in candidates)
        none = f"no unfinished run of {recipe!r} under {str(runs)!r} to resume"
        raise RunError(f"{none}{others or '; start one without --resume'}")
    return max(ready, key=lambda run: run.config_file.stat().st_mtime).path


def make_directory(runs: Path, recipe: str, seed: int) -> Path:
    """Make an empty directory for a run: `runs/demo-seed0-20260102-030405`; `...-2` if that is taken."""
    name = f"{recipe}-seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    while True:
        path = runs / next(names)
        try:
            path.mkdir(parents=True)
            return path
        except OSError as error:
            if not path.is_dir():
                what = refusal(error, "choose other --runs")
                raise RunError(f"could not create run directory {str(path)!r}: {what}") from error


def _config_content(config: Config) -> bytes:
    return f"{_versions_header()}schema_version: {SCHEMA_VERSION}\n{dump_yaml(config)}".encode()


def _versions_header() -> str:
    lines = [f"# python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"]
    for package in ("treadle", "torch", "transformers", "tokenizers", "numpy"):
        try:
            lines.append(f"# {package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"# {package} not installed")
    return "\n".join(lines) + "\n"
