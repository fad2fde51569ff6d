"""One run as the pages see it, read anew where its files have changed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from treadle.core.checked_json import is_unfinished, parse_checked_json
from treadle.core.config import as_override, describe
from treadle.core.errors import RunError, TreadleError
from treadle.core.files import sha256_of
from treadle.core.manifest import Manifest
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.live_status import RunStatus
from treadle.orchestration.reporting.metrics import DECLARED
from treadle.orchestration.store.checkpoint_retention import checkpoint_update
from treadle.orchestration.store.ledger_reader import LedgerReader, salvage
from treadle.orchestration.store.recorded import parse_tokenizer
from treadle.orchestration.store.run_directory import MetricsLog, RunDirectory
from treadle.view import models
from treadle.view.fates import explain
from treadle.view.live import now_of
from treadle.view.texts import TokenTexts, clipped

T = TypeVar("T")
_SPARKLINE = 60  # points of a run's reward in the list of runs
_SPEED_OVER = 10  # updates
_MOST_FAILURES = 20
_MOST_OPEN = 8  # runs of which is kept what was read


class LinesFollower:
    """Incremental reader of metrics.jsonl or intervals.jsonl: each line once; all of them after a rewrite.

    names: what each row must have.
    """

    def __init__(self, path: Path, names: Iterable[str] = ("kind", "update")) -> None:
        self._path, self._names = path, frozenset(names)
        self._lock = Lock()
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = self._lines = self._times = 0
        self._log = MetricsLog([], [])

    def read(self) -> tuple[str, MetricsLog]:
        """Return a name that changes where earlier rows do, and all rows so far."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    self._go_on(file.fileno(), file.read)
            except FileNotFoundError:
                return "none", MetricsLog([], [])
            return f"{self._times}", self._log

    def _go_on(self, descriptor: int, read: Callable[[], bytes]) -> None:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
            self._file, self._offset, self._lines = (status.st_dev, status.st_ino), 0, 0
            self._times += 1
            self._log = MetricsLog([], [])
        os.lseek(descriptor, self._offset, os.SEEK_SET)
        *lines, last = read().split(b"\n")
        self._offset += sum(len(line) + 1 for line in lines)
        if last and not is_unfinished(last):
            lines.append(last)
            self._offset += len(last)
        for line in lines:
            if not line:
                continue
            self._lines += 1
            row = parse_checked_json(line)
            if row is None or not self._names <= row.keys():
                self._log.unreadable.append(self._lines)
            else:
                self._log.rows.append(row)


class RecordedRun:
    """A run directory, opened for reading only. key: its name in links."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.directory = RunDirectory(path)
        self.ledger = LedgerReader(self.directory.ledger_file)
        self._follow_lines()
        self._kept: dict[str, tuple[object, Any]] = {}

    def _follow_lines(self) -> None:
        self._metrics = LinesFollower(self.directory.metrics_file)
        self._intervals = LinesFollower(self.directory.intervals_file, ("update", "phase", "started", "seconds"))

    def release(self) -> None:
        """Forget what was read, save the line in the list of runs: a server may look at hundreds."""
        self._follow_lines()
        self._kept = {name: value for name, value in self._kept.items() if name == "summary"}

    def signature(self) -> str:
        """Return a text that changes whenever anything that is shown may have changed."""
        run = self.directory
        files = (run.metrics_file, run.intervals_file, run.summary_file, run.config_file)
        parts = [(s.st_mtime_ns, s.st_size) for f in files if f.is_file() for s in (f.stat(),)]
        return f"{sha256_of(repr((parts, self.ledger.signature(), self.state())).encode())[:16]}"

    def state(self) -> str:
        try:
            return self.directory.state()
        except OSError:
            return "unknown"

    def now(self) -> models.Now:
        """Return what the run does at this moment, or how it ended; the state alone where it does not say."""
        try:
            status = RunStatus.read(self.directory.status_file)
        except (OSError, ValueError, TypeError, LookupError):  # it is being replaced, or of another version
            status = None
        state = self.state()
        if status is None:
            return models.Now(state=state)
        pace = self.summary().seconds_per_update if state == "in progress" else None
        return now_of(status, state, pace, time.time())

    def kept(self, name: str, of: object, make: Callable[[], T]) -> T:
        """Return what `make` returned last, unless `of` has changed since."""
        found = self._kept.get(name)
        if found is None or found[0] != of:
            found = (of, make())
            self._kept[name] = found
        value: T = found[1]
        return value

    def config(self) -> RunConfig:
        """Return the configuration. Raises TreadleError where it cannot be read, or is not as it was written."""
        try:
            content = self.directory.config_file.read_bytes()
        except OSError as error:
            raise RunError(f"{self.directory.config_file} cannot be read: {error.strerror or error}") from error

        return self.kept("config", content, self.directory.config)

    def metrics(self) -> tuple[str, MetricsLog]:
        return self._metrics.read()

    def intervals(self) -> tuple[str, MetricsLog]:
        return self._intervals.read()

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl of one kind, `update` or `evaluation`."""
        return [row for row in self.metrics()[1].rows if row["kind"] == kind]

    def texts(self) -> tuple[TokenTexts, str | None]:
        """Return the texts of tokens, and why there is no tokenizer: then they are shown by their ids."""
        latest = self._latest_checkpoint()

        def read() -> tuple[TokenTexts, str | None]:
            try:
                return _texts_of(self._tokenizer_file(latest)), None
            except (TreadleError, OSError) as error:
                return TokenTexts(None), f"tokens are shown by their ids, there is no tokenizer: {error}"

        return self.kept("texts", latest, read)

    def _tokenizer_file(self, latest: str | None) -> _TokenizerFile:
        if latest is not None and (self.directory.checkpoints / latest).is_dir():
            folder = self.directory.checkpoints / latest
            manifest = Manifest.load(folder, self.ledger.manifest_sha256(latest), "restore it from a copy")
            return _TokenizerFile(manifest.read("tokenizer.json"), folder)
        folder = tokenizer_directory(self.config().model)
        return _TokenizerFile((folder / "tokenizer.json").read_bytes(), folder)

    def _latest_checkpoint(self) -> str | None:
        try:
            return next(reversed(self.ledger.checkpoint_names()), None)
        except RunError:
            return None

    def update_of(self, version: int | None) -> int | None:
        """Return the update whose batch this version of the policy was trained with; None if it is not logged."""
        return next((row["update"] for row in self.rows("update") if row.get("version") == version), None)

    def versions_of(self, update: int) -> list[int]:
        """Return the versions of the policy that an update was made with: one, or none if it is not logged."""
        return [row["version"] for row in self.rows("update") if row["update"] == update and "version" in row]

    # --- pages -------------------------------------------------------------------------------------------------------

    def summary(self) -> models.RunSummary:
        """Return the run's line in the list of runs; what cannot be read is missing, and said."""
        return self.kept("summary", self.signature(), self._summary)

    def _summary(self) -> models.RunSummary:
        summary = models.RunSummary(key=self.key, name=self.path.name, path=str(self.path), state=self.state())
        updates, evaluated = self.rows("update"), self.rows("evaluation")
        try:
            config = self.config()
            summary.recipe, summary.about, summary.seed = config.recipe, config.about, config.seed
            summary.updates = config.orchestration.updates
            evaluated = [row for row in evaluated if row.get("temperature") == config.evaluation.temperature]
        except TreadleError as error:
            summary.problems.append(str(error))
        held_out = [
            models.HeldOut(update=row["update"], success=row.get("success"), reward=row.get("reward_mean"))
            for row in evaluated
        ]
        graded = [h for h in held_out if h.success is not None]
        summary.best = max(graded, key=lambda h: (h.success or 0.0, -h.update), default=None)
        summary.last = held_out[-1] if held_out else None
        if updates:
            summary.update = max(row["update"] for row in updates)
            summary.reward = updates[-1].get("reward_mean")
            summary.rewards = _thinned([row.get("reward_mean") for row in updates], _SPARKLINE)
            summary.wall_seconds = updates[-1].get("wall_seconds")
            summary.seconds_per_update = _pace(updates[-_SPEED_OVER - 1 :])
        unreadable = self.metrics()[1].unreadable
        if unreadable:
            summary.problems.append(f"metrics.jsonl cannot be read in line {', '.join(map(str, unreadable[:5]))}")
        summary.problems += [
            problem for problem in [self._ledger_problem()] if problem and problem not in summary.problems
        ]
        return summary

    def _ledger_problem(self) -> str | None:
        """Return why the ledger cannot be read, or that there is none."""
        if not self.ledger.path.is_file():
            if any(self.directory.checkpoints.glob("step-*")):
                return f"the run has no ledger any more; {salvage(self.path)}"
            live = self.state() == "in progress"
            return None if live else "nothing was recorded before the run was stopped: the run has no ledger"
        try:
            self.ledger.checkpoint_names()
        except RunError as error:
            return str(error)
        return None

    def _no_update(self) -> str:
        """Return why no update can be drawn; nothing where one can."""
        if self.rows("update"):
            return ""
        if lines := self.metrics()[1].unreadable:
            return f"No line of metrics.jsonl that names an update can be read; damaged lines: {len(lines)}."
        with suppress(RunError):  # the problems say so
            done = max(map(checkpoint_update, map(Path, self.ledger.checkpoint_names())), default=0)
            if done:
                return f"metrics.jsonl names no update, but there is a checkpoint of update {done}: restore the file."
        if self.state() == "in progress":
            return "No update yet; this page fills with the first one."
        return f"The run {'ended' if self.state() == 'finished' else 'was stopped'} before its first update."

    def detail(self) -> models.RunDetail:
        """Return what the run's own page begins with."""
        return self.kept("detail", self.signature(), self._detail)

    def _detail(self) -> models.RunDetail:
        detail = models.RunDetail(**self.summary().model_dump())
        detail.no_update = self._no_update()
        detail.metrics = {m.name: {"unit": m.unit, "help": m.help, "view": m.view} for m in DECLARED}
        with suppress(TreadleError):  # the summary says so
            detail.settings = [
                models.Setting(path=f.path, value=as_override(f.value), is_default=f.is_default, help=f.help)
                for f in describe(self.config())
            ]
        try:
            detail.summary = json.loads(self.directory.summary_file.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            detail.problems.append(f"summary.json cannot be read: {error}")
        with suppress(RunError):  # as above
            names = self.ledger.checkpoint_names()
            detail.checkpoints = [name for name in names if (self.directory.checkpoints / name).is_dir()]
        return detail

    def counts(self) -> models.Counts:
        """Return what the ledger holds; nothing where there is none yet. Raises RunError."""
        if not self.ledger.path.is_file():
            return models.Counts()
        return self.kept("counts", self.ledger.signature(), self._count)

    def _count(self) -> models.Counts:
        names = ("split", "state", "reason", "count")
        example = ("cause", "message", "count", "trajectory_id")
        failures = [{name: row[name] for name in example} for row in self.ledger.failures()[:_MOST_FAILURES]]
        return models.Counts(
            splits=[models.Split(**row) for row in self.ledger.splits()],
            states=[
                models.StateCount(**{n: row[n] for n in names}, text=explain(row["state"], row["reason"]).text)
                for row in self.ledger.step_states()
            ],
            failures=[models.FailureCount(**{**row, "message": clipped(row["message"])}) for row in failures],
        )


@dataclass(frozen=True)
class _TokenizerFile:
    """Content of a tokenizer.json. folder: its directory, for errors."""

    content: bytes
    folder: Path = field(compare=False)


@lru_cache(maxsize=2)
def _texts_of(tokenizer: _TokenizerFile) -> TokenTexts:
    """Return the texts of a tokenizer. It takes much memory, so that runs of the same model share it."""
    return TokenTexts(parse_tokenizer(tokenizer.content, tokenizer.folder))


def _pace(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the seconds of an update over some rows; None of fewer than two."""
    if len(rows) < 2 or "wall_seconds" not in rows[0] or "wall_seconds" not in rows[-1]:
        return None
    done = rows[-1]["update"] - rows[0]["update"]
    return float(rows[-1]["wall_seconds"] - rows[0]["wall_seconds"]) / done if done > 0 else None


def _thinned(values: Sequence[float | None], most: int) -> list[float | None]:
    """Return at most this many of the values, evenly chosen, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


class Runs:
    """The runs below some paths: run directories, and folders of them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.roots = list(paths)
        self._runs: dict[Path, RecordedRun] = {}
        self._open: list[RecordedRun] = []  # the latest that were asked for, the newest last
        self._lock = Lock()

    def all(self) -> list[RecordedRun]:
        """Return the runs that are there now, the newest first."""
        with self._lock:
            there = [path for root in self.roots for path in _runs_in(root)]
            for path in there:
                if path not in self._runs:
                    self._runs[path] = RecordedRun(path, self._key(path))
            return [self._runs[path] for path in sorted(dict.fromkeys(there), key=_changed, reverse=True)]

    def summaries(self) -> list[models.RunSummary]:
        """Return the lines of all runs."""
        lines = []
        for run in self.all():
            lines.append(run.summary())
            if run not in self._open:
                run.release()
        return lines

    def get(self, key: str) -> RecordedRun:
        """Return a run by its key. Raises RunError."""
        for _ in range(2):
            with self._lock:
                if (found := next((r for r in self._runs.values() if r.key == key), None)) is not None:
                    self._open = [*(run for run in self._open if run is not found), found][-_MOST_OPEN:]
                    return found
            self.all()
        raise RunError(f"no run {key!r} here; the list of runs has them all")

    def _key(self, path: Path) -> str:
        taken = {run.key for run in self._runs.values()}
        name = path.resolve().name.encode("utf-8", "replace").decode() or "run"
        key, number = name, 2
        while key in taken:
            key, number = f"{name}~{number}", number + 1
        return key


def _runs_in(root: Path) -> list[Path]:
    if (root / "config.yaml").is_file():
        return [root]
    try:
        return sorted(path.parent for path in root.glob("*/config.yaml"))
    except OSError:
        return []


def _changed(path: Path) -> float:
    try:
        return max(f.stat().st_mtime for f in (path / "metrics.jsonl", path / "config.yaml") if f.is_file())
    except (OSError, ValueError):
        return 0.0
