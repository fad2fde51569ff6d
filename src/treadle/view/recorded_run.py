"""One run as the pages show it, reread when its files have changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Query, Request
from fastapi import Path as InPath

from treadle.core.errors import RunError, TreadleError
from treadle.core.files import sha256_of
from treadle.plan.config import config_of
from treadle.record.group_search import LARGEST
from treadle.record.record import Record
from treadle.record.run_directory import JsonLog
from treadle.rendering.texts import TokenTexts
from treadle.report.stalls import stalls
from treadle.report.status import RunStatus, duration
from treadle.view.texts import Json

T = TypeVar("T")
Number = Annotated[int, Query(ge=0, le=LARGEST)]
Key = Annotated[str, InPath(max_length=1000)]
_SPARKLINE = 60  # points of a run's reward in the list of runs
_SPEED_OVER = 10  # updates


class RecordedRun(Record):
    """A run that may be unreadable, incomplete or growing. key: its name in links."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(path)
        self.key = key
        self._kept: dict[str, tuple[object, Any]] = {}

    def signature(self) -> str:
        """Return a text that changes whenever anything shown may have changed."""
        run = self.directory
        files = (run.metrics_file, run.intervals_file, run.summary_file, run.config_file)
        parts = [(s.st_mtime_ns, s.st_size) for f in files if f.is_file() for s in (f.stat(),)]
        return sha256_of(repr((parts, self.ledger.signature(), self.state())).encode())[:16]

    def state(self) -> str:
        try:
            return self.directory.state()
        except OSError:
            return "unknown"

    def now(self) -> Json:
        """Return in words the run's activity or end (`doing`), and the remaining time (`left`).

        has_failed: whether an error ended it.
        """
        state, status = self.state(), RunStatus.read(self.directory.status_file)
        if status is None:
            return {"state": state, "doing": "", "left": "", "message": "", "has_failed": False}
        seconds: float | None = None
        if state == "in progress" and status.phase == "warm start":
            if status.done:
                seconds = (status.total - status.done) * (status.written - status.since) / status.done
        elif state == "in progress" and (pace := self.summary()["seconds_per_update"]) is not None:
            seconds = (status.updates - status.update) * pace
        of_it = " of it" if status.phase == "warm start" else ""
        left = f"about {duration(seconds)} left{of_it}" if seconds else ""
        has_failed = state == "stopped" and bool(status.failure)
        doing = status.doing(self.directory)
        return {"state": state, "doing": doing, "left": left, "message": status.message, "has_failed": has_failed}

    def kept(self, name: str, of: object, make: Callable[[], T]) -> T:
        """Return the latest result of `make`, unless `of` has changed since."""
        entry = self._kept.get(name)
        if entry is None or entry[0] != of:
            entry = self._kept[name] = (of, make())
        value: T = entry[1]
        return value

    def config(self) -> Any:
        """Return the run's configuration, with a section for each part. Raises RunError or DamageError."""
        try:
            content = self.directory.config_file.read_bytes()
        except OSError as error:
            raise RunError(f"{self.directory.config_file} cannot be read: {error.strerror or error}") from error
        return self.kept("config", content, lambda: config_of(self.directory))

    def log(self, file: Path) -> tuple[str, JsonLog]:
        """Return metrics.jsonl or intervals.jsonl, and a name that changes when the file is rewritten."""
        try:
            s = file.stat()
        except FileNotFoundError:
            return "none", JsonLog([], [])
        return str(s.st_ino), self.kept(file.name, (s.st_ino, s.st_mtime_ns, s.st_size), lambda: JsonLog.read(file))

    def metrics(self) -> JsonLog:
        return self.log(self.directory.metrics_file)[1]

    def rows(self, kind: str) -> list[Json]:
        return [row for row in self.metrics().rows if row["kind"] == kind]

    def shown_texts(self) -> tuple[TokenTexts, str | None]:
        """Return the texts of tokens, and why there is no tokenizer, so that ids are shown."""
        try:
            latest = next(reversed(self.ledger.checkpoint_names()), None)
        except RunError:
            latest = None

        def read() -> tuple[TokenTexts, str | None]:
            try:
                return TokenTexts(self.tokenizer()), None
            except (TreadleError, OSError) as error:
                return TokenTexts(None), f"tokens are shown by their ids, there is no tokenizer: {error}"

        return self.kept("texts", latest, read)

    def update_of(self, version: int | None) -> int | None:
        """Return the update that trained this policy version's batch; None if it is not logged."""
        return next((row["update"] for row in self.rows("update") if row.get("version") == version), None)

    def versions_of(self, update: int) -> list[int]:
        """Return the policy versions used by an update: one, or none if it is not logged."""
        return [row["version"] for row in self.rows("update") if row["update"] == update]

    def summary(self) -> Json:
        """Return the run's row in the list of runs; unreadable data is missing, and named in `problems`."""
        return self.kept("summary", self.signature(), self._summary)

    def _summary(self) -> Json:
        summary: Json = {"key": self.key, "name": self.path.name, "path": str(self.path), "state": self.state()}
        # Not kept: there may be hundreds of runs.
        log = JsonLog.read(self.directory.metrics_file)
        updates, evaluated = ([row for row in log.rows if row["kind"] == kind] for kind in ("update", "evaluation"))
        problems = [log.problem(0), self._ledger_problem(), self._summary_problem(), *stalls(log.rows).values()]
        try:
            config = self.config()
            summary |= {"recipe": config.recipe, "about": config.about, "seed": config.seed}
            summary["updates"] = config.orchestration.updates
            evaluated = [row for row in evaluated if row["temperature"] == config.evaluation.temperature]
        except TreadleError as error:
            summary |= {"recipe": "", "about": "", "seed": None, "updates": 0}
            problems.insert(0, str(error))
        held_out = [{"update": r["update"], "success": r["success"], "reward": r["reward_mean"]} for r in evaluated]
        graded = [h for h in held_out if h["success"] is not None]
        first, last = (updates[-_SPEED_OVER - 1 :][0], updates[-1]) if updates else ({}, {})
        done = last.get("update", 0) - first.get("update", 0)
        evenly = dict.fromkeys(round(i * (len(updates) - 1) / (_SPARKLINE - 1)) for i in range(_SPARKLINE))
        return summary | {
            "update": max((row["update"] for row in updates), default=0),
            "best": max(graded, key=lambda h: (h["success"], -h["update"]), default=None),
            "last": held_out[-1] if held_out else None,
            "reward": last.get("reward_mean"),
            "rewards": [updates[i].get("reward_mean") for i in evenly] if updates else [],
            "seconds_per_update": (last["wall_seconds"] - first["wall_seconds"]) / done if done > 0 else None,
            "wall_seconds": last.get("wall_seconds"),
            "problems": list(dict.fromkeys(filter(None, problems))),
        }

    def _summary_problem(self) -> str | None:
        try:
            json.loads(self.directory.summary_file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"summary.json cannot be read: {error}"
        return None

    def _ledger_problem(self) -> str | None:
        if not self.ledger.path.is_file() and not self.directory.has_checkpoint:
            live = self.state() == "in progress"
            return None if live else "nothing was recorded before the run was stopped: the run has no ledger"
        try:
            self.directory.ledger().checkpoint_names()
        except RunError as error:
            return str(error)
        return None


class Runs:
    """The runs below some paths: run directories, and folders of them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.roots = list(paths)
        self._runs: dict[Path, RecordedRun] = {}
        self._lock = Lock()

    def all(self) -> list[RecordedRun]:
        with self._lock:
            paths = [path for root in self.roots for path in _runs_in(root)]
            for path in paths:
                if path not in self._runs:
                    self._runs[path] = RecordedRun(path, self._new_key(path))
            return [self._runs[path] for path in sorted(dict.fromkeys(paths), key=_changed, reverse=True)]

    def get(self, key: str) -> RecordedRun:
        if key not in {run.key for run in list(self._runs.values())}:
            self.all()  # may be new
        with self._lock:
            for run in self._runs.values():
                if run.key == key:
                    return run
        raise RunError(f"no run {key!r} here; see the list of runs")

    def _new_key(self, path: Path) -> str:
        name = path.resolve().name.encode("utf-8", "replace").decode() or "run"
        taken = {run.key for run in self._runs.values()}
        return next(key for key in (name, *(f"{name}~{n}" for n in range(2, len(taken) + 3))) if key not in taken)


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


def _requested(request: Request, key: Key) -> RecordedRun:
    run: RecordedRun = request.app.state.runs.get(key)
    return run


Run = Annotated[RecordedRun, Depends(_requested)]
"""Parameter of a route: the run named in its path."""
