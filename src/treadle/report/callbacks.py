"""Following a run: the events that a user's code and the trackers get while it trains.

    start -> publish -> [evaluate] -> checkpoint
          -> (rollout ... -> batch -> update ... -> publish -> [evaluate] -> [checkpoint]) ...
          -> [checkpoint] -> [evaluate] -> end

With `orchestration.max_staleness` above 0, `rollout` comes at any time in between; `phase`, `interval` and `message`
always may.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partialmethod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from treadle.core.engine import ComponentStatus, ProcessId
from treadle.core.errors import ConfigError, RunError, TreadleError
from treadle.core.registry import resolve
from treadle.core.text import escape_line
from treadle.core.types import Group, Ids, Trajectory
from treadle.core.user_functions import Expected, check_function
from treadle.loop.stopping import StopRequest
from treadle.plan.config import CallbackConfig, RunConfig
from treadle.record.run_directory import RunDirectory
from treadle.report.metrics import EvaluationResult, shown, shown_passes
from treadle.rollout.isolation.event_loop import handled
from treadle.rollout.isolation.user_code import raised


@dataclass(frozen=True, slots=True)
class RunStart:
    """Start of a run. update: the last one already made, 0 in a new run. log: adds a line to the run's output.

    decode: returns the text of token ids, with special tokens.
    """

    directory: Path
    config: RunConfig
    update: int
    log: Callable[[str], None]
    decode: Callable[[Ids], str]


class Callback:
    """Follows a run. Subclass it and override the methods you want.

    All methods run on the thread of the run's event loop, which waits for them: return soon. Arguments are read-only
    and return values ignored: a callback cannot change what is trained. An exception in `start` ends the run before it
    begins. One in another method switches the callback off and stops the run after the current update, with a
    checkpoint; a TreadleError stops it at once.
    """

    def start(self, run: RunStart) -> None:
        """Start of a run, also of a resumed one, before anything is computed."""

    def rollout(self, trajectory: Trajectory) -> None:
        """A training attempt has finished and is on record."""

    def batch(self, groups: Sequence[Group], version: int) -> None:
        """These groups are trained next, starting from the weights of this version."""

    def update(self, row: Mapping[str, Any]) -> None:
        """An optimizer update was made; `row` is its line of metrics.jsonl."""

    def publish(self, version: int) -> None:
        """From now on the engine samples with the weights of this version."""

    def evaluate(self, result: EvaluationResult) -> None:
        """Result of an evaluation on the held-out tasks."""

    def checkpoint(self, directory: Path, update: int) -> None:
        """Complete checkpoint after this update; later ones remove it, as `orchestration.keep_last` says."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Progress of a phase (rollout, update, evaluation): `done` of `total` equal pieces; 0: it begins."""

    def interval(self, row: Mapping[str, Any]) -> None:
        """A phase has ended, publications and checkpoints among them: its line of intervals.jsonl."""

    def message(self, line: str) -> None:
        """A line of the run's output: a failure seen for the first time, a task that is left out."""

    def end(self, summary: Mapping[str, Any] | None, error: BaseException | None) -> None:
        """End of the run, with its summary or an error. An exception here only becomes a line of output."""


EVENTS = tuple(name for name, member in vars(Callback).items() if inspect.isfunction(member) and name[0] != "_")
"""The methods of a callback, in the order of a run."""


class JsonLines(Callback):
    """Writes metrics.jsonl, a line per update and evaluation, and intervals.jsonl. Every run has them."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def update(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(row))

    def evaluate(self, result: EvaluationResult) -> None:
        self._run.log({"kind": "evaluation", **asdict(result)})

    def interval(self, row: Mapping[str, Any]) -> None:
        self._run.log_interval(dict(row))


class Callbacks(Callback):
    """Passes each event on to `members` (name -> callback) in order, and attributes what one of them raises.

    progress: Treadle's own, called last: what it raises is a bug, and ends the run.
    """

    def __init__(self, members: Mapping[str, Callback], stop: StopRequest, progress: Callback | None = None) -> None:
        self._members, self.stop, self._progress = dict(members), stop, progress

    def around(self, run: RunStart, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Start the callbacks and do the work; returns its summary. Those that were started get `end` in any case."""
        started: dict[str, Callback] = {}
        summary: Mapping[str, Any] | None = None
        failure: BaseException | None = None
        try:
            for name, callback in self._members.items():
                started[name] = callback
                error = _raised_by(callback.start, run)
                if isinstance(error, TreadleError):
                    raise error
                if error is not None:
                    raise RunError(raised(f"callback {name}: start", error)) from error
            result = work()
            summary = MappingProxyType(result)
            return result
        except BaseException as error:
            failure = error
            raise
        finally:
            for name, callback in started.items():
                if (problem := _raised_by(callback.end, summary, failure)) is not None:
                    run.log(raised(f"callback {name}: end", problem))

    def notify(self, event: str, *arguments: Any) -> None:
        """Call each callback. Switch off one that fails and request a stop: state is whole only between updates."""
        for name, callback in list(self._members.items()):
            error = _raised_by(getattr(callback, event), *map(_read_only, arguments))
            if isinstance(error, TreadleError):
                raise error
            if error is not None:
                del self._members[name]
                self.stop.request(raised(f"callback {name}: {event}", error), error)
        if self._progress is not None:
            getattr(self._progress, event)(*arguments)


for _event in EVENTS[1:-1]:  # `around` calls `start` and `end`
    setattr(Callbacks, _event, partialmethod(Callbacks.notify, _event))


def load_callbacks(configs: Sequence[CallbackConfig], instances: Sequence[Callback] = ()) -> dict[str, Callback]:
    """Return name -> callback: those configured, then the user's `instances`. Raises ConfigError."""
    members: dict[str, Callback] = {}
    for config in configs:
        if config.name in members:
            raise ConfigError(f"callbacks: {config.name!r} is listed twice; keep one")
        make = resolve("callbacks", config.name)
        if not callable(make):
            raise ConfigError(
                f"callbacks: {config.name!r} is of type {type(make).__name__}; name a treadle.Callback's class"
            )
        try:
            inspect.signature(make).bind(**config.options)
        except TypeError as error:
            raise ConfigError(f"callbacks: {config.name!r} does not accept these options: {error}") from error
        members[config.name] = make(**config.options)
    for number, callback in enumerate(instances, 1):
        members[f"{type(callback).__qualname__} ({number} of callbacks=)"] = callback
    for name, callback in members.items():
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks: {name!r} gives {callback!r}, not a treadle.Callback; "
                + (f"pass an instance, {callback.__name__}()" if isinstance(callback, type) else "subclass that")
            )
        _check_methods(name, callback)
    return members


def _check_methods(name: str, callback: Callback) -> None:
    """Raise ConfigError for a callback that follows nothing, or whose methods cannot be called as they will be."""
    own = [event for event in EVENTS if getattr(type(callback), event, None) is not getattr(Callback, event)]
    if not own:
        raise ConfigError(f"callbacks: {name!r} has none of the methods {', '.join(EVENTS)}; write one of them")
    if waiting := [event for event in own if inspect.iscoroutinefunction(getattr(callback, event))]:
        raise ConfigError(f"callbacks: {name!r} has async methods ({', '.join(waiting)}); write plain ones")
    for event in own:
        arguments = ", ".join(inspect.signature(getattr(Callback, event)).parameters)
        shown = f"    def {event}({arguments}):\n        print({arguments.rpartition(', ')[2]})"
        check_function(getattr(callback, event), f"callbacks: {name!r}: {event}", Expected(shown))


def _raised_by(method: Callable[..., None], *arguments: Any) -> BaseException | None:
    """Return what the callback raises, if anything: user code's exceptions are caught here, and only here."""
    try:
        method(*arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # attributed by the caller
        return error
    return None


def _read_only(argument: Any) -> Any:
    """Return a copy of what a callback might change."""
    match argument:
        case Mapping():
            return MappingProxyType(dict(argument))
        case list():
            return tuple(argument)
        case EvaluationResult():
            return deepcopy(argument)
    return argument


class Progress(Callback):
    """Shows a run, or the work of another command, to a person; its methods must return at once."""

    def log(self, line: str) -> None:
        """Show a line that is worth keeping."""

    def message(self, line: str) -> None:
        self.log(line)

    def phase(self, name: str, done: int, total: int, note: str = "") -> None:
        """Show the progress of a phase. note: a few words beside it."""

    def loading(self) -> None:
        """Show that PyTorch is loaded next, which takes seconds without another event."""


@contextmanager
def loading(progress: Progress) -> Iterator[None]:
    """Import PyTorch within this context: it takes seconds. Libraries may swallow a Ctrl-C while they are imported, or
    replace it by an error of their own: here it is raised in any case.
    """
    progress.loading()
    with handled(_interrupt, signal.SIGINT) as interrupted:
        try:
            yield
        except Exception:
            if not interrupted:
                raise
        if interrupted:
            raise KeyboardInterrupt


def _interrupt() -> None:
    raise KeyboardInterrupt


def update_line(row: Mapping[str, Any], updates: int, width: float = math.inf) -> str:
    """Return `update 37/200  reward 0.61 ...`, most important first, without what exceeds `width`; failures always."""
    gap = row.get("logprob_gap_max")  # not of every update
    figures = [
        f"update {row['update']:>{len(str(updates))}}/{updates}",
        f"reward {shown(row['reward_mean'])}",
        f"success {shown(row['success'])}",
        f"steps {shown(row['steps_mean'], 2)}",
        f"tokens {shown(row['completion_tokens_mean'], 1)}",
        f"entropy {shown(row['entropy'])}",
        f"gap {'-' if gap is None else f'{gap:.0e}'}",
        f"rollout {row['seconds_rollout']:.2f}s",
        f"update {row['seconds_update']:.2f}s",
    ]
    failed = [f"FAILED {row['failed']}/{row['trajectories']}"] if row["failed"] else []
    while len(line := "  ".join([*figures, *failed])) > width and len(figures) > 1:
        figures.pop()
    return line


def evaluation_lines(result: EvaluationResult, table_by: str | None = None, width: float = math.inf) -> list[str]:
    """Return `held-out success 0.412 (512 tasks, temperature 1, after 50 updates)  hops 1: 0.903  2: 0.251`.

    table_by: what the result's parts are by. width: in columns; what does not fit goes into further lines, whole.
    """
    how = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    failed = f", {result.failed} failed" if result.failed else ""
    tasks = f"{result.tasks} tasks" + (f" x {result.attempts}" if result.attempts > 1 else "")
    passes = shown_passes(result.pass_at, result.pass_tasks)
    by = [f"{key}: {shown(value)}" for key, value in result.by.items()]
    if by and table_by:
        by[0] = f"{table_by} {by[0]}"
    lines = [f"held-out success {shown(result.success)} ({tasks}{failed}, {how}, after {result.update} updates)"]
    for part in (*passes, *by):
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"  {part}")
    return lines


class PlainProgress(Progress):
    """Prints plain lines, for logs and scripts: the updates, and a phase's progress after a while without a line.

    updates: of the whole run. table_by: what evaluations are split by. interval: seconds without a line.
    """

    def __init__(self, updates: int = 0, table_by: str | None = None, interval: float = 30.0) -> None:
        self._updates, self._table_by, self._interval = updates, table_by, interval
        self._last = -math.inf  # when something was printed

    def log(self, line: str) -> None:
        self._last = time.monotonic()
        print(escape_line(line), flush=True)  # noqa: T201

    def loading(self) -> None:
        if "torch" not in sys.modules:
            self.log("loading PyTorch and transformers")
            self._last = -math.inf  # the first phase is shown at once

    def phase(self, name: str, done: int, total: int, note: str = "") -> None:
        if done and time.monotonic() - self._last >= self._interval:
            self.log(f"{name} {done}/{total} {note}".rstrip())

    def update(self, row: Mapping[str, Any]) -> None:
        self.log(update_line(row, self._updates))

    def evaluate(self, result: EvaluationResult) -> None:
        self.log(*evaluation_lines(result, self._table_by))


class NotebookProgress(PlainProgress):
    """Prints as `PlainProgress`, every tenth update, and below it a line for the phase in progress, written over."""

    def __init__(self, updates: int = 0, table_by: str | None = None) -> None:
        super().__init__(updates, table_by)
        self._done, self._figures, self._shown, self._length = 0, "", -math.inf, 0

    def log(self, line: str) -> None:
        self._show("")
        super().log(line)

    def phase(self, name: str, done: int, total: int, note: str = "") -> None:
        if done == 0 or time.monotonic() - self._shown >= _REFRESH:
            of_run = f"updates {self._done}/{self._updates} {_bar(self._done, self._updates)}" if self._updates else ""
            pieces = f"{done}/{total} {_bar(done, total)}" if total > 1 else ""
            self._show(escape_line("  ".join(filter(None, [of_run, self._figures, name, pieces, note]))))

    def update(self, row: Mapping[str, Any]) -> None:
        self._done = row["update"]
        self._figures = f"reward {shown(row['reward_mean'])}  success {shown(row['success'])}"
        if self._done % EVERY == 0 or self._done in (1, self._updates) or row["failed"]:
            super().update(row)

    def _show(self, text: str) -> None:
        """Write over what was shown last, whatever the front end makes of escape sequences."""
        if text or self._length:
            print(f"\r{text:<{self._length}}", end="" if text else "\r", flush=True)  # noqa: T201
        self._shown, self._length = time.monotonic(), len(text)


EVERY = 10  # updates between lines that stay, where a bar shows each
_REFRESH = 0.25  # seconds


def _bar(done: int, total: int, width: int = 20) -> str:
    filled = width * done // max(total, 1)
    return "█" * filled + "░" * (width - filled)


_PERIOD = 1.0  # seconds
_STALE = 10.0  # seconds without a status after which `doing` says so


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What a run does at one moment.

    written: that moment, in seconds since 1970. update: the last one made, of `updates`. phase: in progress since
    `since`, `done` of `total` pieces of it. trained, published: policy versions of the learner and the engines; None
    before the first publication. message: the last line of the run's output, and when. error: what ended the run.
    interrupted: whether it was asked to stop (Ctrl-C, SIGTERM), and saved a checkpoint.
    """

    process: ProcessId
    written: float
    update: int = 0
    updates: int = 0
    phase: str = "starting"
    done: int = 0
    total: int = 0
    since: float = 0.0
    trained: int | None = None
    published: int | None = None
    message: str = ""
    message_at: float = 0.0
    error: str = ""
    interrupted: bool = False
    components: tuple[ComponentStatus, ...] = ()

    @classmethod
    def read(cls, path: Path) -> RunStatus | None:
        """Return what a run wrote last; None if there is nothing that can be read."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (OSError, ValueError):
            return None

    @property
    def failure(self) -> str:
        """The error that ended the run; "" if none did, or a person."""
        return "" if self.error == KeyboardInterrupt.__name__ else self.error

    def doing(self, run: RunDirectory) -> str:
        """Return in words what the run does, or how it ended and is resumed: `rollout 12/64 for 8 s`."""
        when, state = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.written)), run.state()
        if state == "finished" or self.failure:
            return f"ended {when}: {self.failure}".removesuffix(": ")
        if state != "in progress":
            resume = f"resume with: {run.resume_command}" if run.has_checkpoint else "there is no checkpoint to resume"
            if self.interrupted:
                return f"interrupted {when} after update {self.update} of {self.updates}; {resume}"
            what = "interrupted" if self.error else "last status"
            return f"{what} {when}, during {self.phase}; {resume}"
        if (silent := time.time() - self.written) > _STALE:
            return f"no status for {duration(silent)}, since {self.phase}: the process may be stopped, or its disk full"
        pieces = f" {self.done}/{self.total}" if self.total > 1 else ""
        return f"{self.phase}{pieces} for {duration(time.time() - self.since)}"


def duration(seconds: float) -> str:
    """Return `8 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class LiveStatus(Callback):
    """Writes what the run does each second, on a thread: also while the event loop computes.

    sources: called for the status of the run's components.
    """

    def __init__(self) -> None:
        now = time.time()
        self.sources: list[Callable[[], Sequence[ComponentStatus]]] = []
        self._status = RunStatus(ProcessId.own(), written=now, since=now)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Write the file each second within the context, and once more on leaving, with what was raised."""
        ended = threading.Event()

        def work() -> None:
            while not ended.wait(_PERIOD):
                self._write(path)

        thread = threading.Thread(target=work, name="treadle-status", daemon=True)
        self._write(path)
        thread.start()
        try:
            yield
        except BaseException as error:
            self._change(error=f"{type(error).__name__}: {error}".rstrip(": "))
            raise
        finally:
            ended.set()
            thread.join()
            self.sources.clear()  # the components have ended
            self._write(path)

    def start(self, run: RunStart) -> None:
        self._change(update=run.update, updates=run.config.orchestration.updates)

    def update(self, row: Mapping[str, Any]) -> None:
        self._change(update=row["update"])

    def publish(self, version: int) -> None:
        self._change(trained=version, published=version)

    def end(self, summary: Mapping[str, Any] | None, error: BaseException | None) -> None:
        self._change(interrupted=summary is not None and summary["stopped_early"])

    def phase(self, name: str, done: int, total: int) -> None:
        self._change(phase=name, done=done, total=total, since=time.time() if done == 0 else self._status.since)

    def interval(self, row: Mapping[str, Any]) -> None:
        """End of a phase: the learner is a version ahead of the engines until its weights are published."""
        if row["phase"] == "update" and self._status.published is not None:
            self._change(trained=self._status.published + 1)
            self.phase("publish", 0, 0)
        elif row["phase"] == "publish":
            self._change(published=self._status.trained)

    def message(self, line: str) -> None:
        self._change(message=line, message_at=time.time())

    def _change(self, **fields: Any) -> None:
        self._status = replace(self._status, **fields)

    def _write(self, path: Path) -> None:
        components = tuple(component for source in tuple(self.sources) for component in source())
        status = replace(self._status, written=time.time(), components=components)
        temporary = path.with_name(f".{path.name}.new")
        with suppress(OSError):  # a full disk ends the run elsewhere; the next write may succeed
            temporary.write_text(json.dumps(asdict(status)), encoding="utf-8")
            os.replace(temporary, path)  # not durable, and need not be
