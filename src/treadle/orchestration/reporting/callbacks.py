"""Following a run: the events that a user's code and the trackers get while it trains.

    start -> publish -> [evaluate] -> checkpoint
          -> (rollout ... -> batch -> update ... -> publish -> [evaluate] -> [checkpoint]) ...
          -> [checkpoint] -> [evaluate] -> end

With `orchestration.max_staleness` above 0 `rollout` comes at any time in between; `phase`, `interval` and `message`
always may.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from treadle.core.errors import ConfigError, RunError, TreadleError
from treadle.core.registry import resolve
from treadle.core.types import Group, Trajectory
from treadle.orchestration.config import CallbackConfig, RunConfig
from treadle.orchestration.reporting.metrics import EvaluationResult
from treadle.orchestration.stop_request import StopRequest
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.rollout.isolation.user_code import raised


@dataclass(frozen=True, slots=True)
class RunStart:
    """Holds what a callback gets at the start of a run.

    update: number of the last update that is already made; 0 in a new run. log: puts a line into the run's output.
    """

    directory: Path
    config: RunConfig
    update: int
    log: Callable[[str], None]


@runtime_checkable
class Callback(Protocol):
    """Follows a run. Subclass it and write the methods you want; the others do nothing.

    All are called on the thread of the run's event loop, which waits for them: return soon. Arguments are read-only and
    return values ignored: a callback cannot change what is trained. An exception in `start` ends the run before it
    begins. One in another method switches the callback off and stops the run after the current update, with a
    checkpoint; but a TreadleError stops it at once.
    """

    def start(self, run: RunStart) -> None:
        """Handle the start of a run, also of a resumed one, before anything is computed."""
        return

    def rollout(self, trajectory: Trajectory) -> None:
        """Handle a training attempt that has finished and is on record."""
        return

    def batch(self, groups: Sequence[Group], version: int) -> None:
        """Handle the groups that are trained next, starting from the weights of this version."""
        return

    def update(self, row: Mapping[str, Any]) -> None:
        """Handle an optimizer update that was made; `row` is its line of metrics.jsonl."""
        return

    def publish(self, version: int) -> None:
        """Handle a publication: from now on the engine samples with the weights of this version."""
        return

    def evaluate(self, result: EvaluationResult) -> None:
        """Handle the result of an evaluation on the held-out tasks."""
        return

    def checkpoint(self, directory: Path, update: int) -> None:
        """Handle a complete checkpoint after this update; later ones remove it, as `orchestration.keep_last` says."""
        return

    def phase(self, name: str, done: int, total: int) -> None:
        """Handle a phase's progress (rollout, update, evaluation): `done` of `total` equal pieces; 0: it begins."""
        return

    def interval(self, row: Mapping[str, Any]) -> None:
        """Handle a phase that has ended, publications and checkpoints among them: its line of intervals.jsonl."""
        return

    def message(self, line: str) -> None:
        """Handle a line of the run's output: what failed for the first time, which task is left out."""
        return

    def end(self, summary: Mapping[str, Any] | None, error: BaseException | None) -> None:
        """Handle the end of the run, or its interruption: with its summary, or with an error.

        An exception in this method only becomes a line of output.
        """
        return


EVENTS = tuple(name for name, member in vars(Callback).items() if inspect.isfunction(member) and name[0] != "_")
"""The methods of a callback, in the order of a run."""


class JsonLines(Callback):
    """Writes metrics.jsonl: one line per update and per evaluation; and intervals.jsonl. Every run has them."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def update(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(row))

    def evaluate(self, result: EvaluationResult) -> None:
        self._run.log({"kind": "evaluation", **asdict(result)})

    def interval(self, row: Mapping[str, Any]) -> None:
        self._run.log_interval(dict(row))


class Callbacks(Callback):
    """Passes each event on to `members` (name -> callback), in their order, and attributes what one of them raises.

    progress: Treadle's own, which comes last: what it raises is a bug, and ends the run.
    """

    def __init__(self, members: Mapping[str, Callback], stop: StopRequest, progress: Callback | None = None) -> None:
        self._members, self.stop, self._progress = dict(members), stop, progress

    def around(self, run: RunStart, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Start the callbacks and do the work; returns its summary. Those that were started get `end` in any case.

        Raises RunError if a callback cannot start, and what `work` raises.
        """
        started: dict[str, Callback] = {}
        try:
            for name, callback in self._members.items():
                started[name] = callback
                _start(name, callback, run)
            summary = work()
        except BaseException as error:
            _end(started, run, None, error)
            raise
        _end(started, run, MappingProxyType(summary), None)
        return summary

    def rollout(self, trajectory: Trajectory) -> None:
        self._notify("rollout", lambda callback: callback.rollout(trajectory))

    def batch(self, groups: Sequence[Group], version: int) -> None:
        self._notify("batch", lambda callback: callback.batch(tuple(groups), version))

    def update(self, row: Mapping[str, Any]) -> None:
        self._notify("update", lambda callback: callback.update(MappingProxyType(dict(row))))

    def publish(self, version: int) -> None:
        self._notify("publish", lambda callback: callback.publish(version))

    def evaluate(self, result: EvaluationResult) -> None:
        self._notify("evaluate", lambda callback: callback.evaluate(deepcopy(result)))

    def checkpoint(self, directory: Path, update: int) -> None:
        self._notify("checkpoint", lambda callback: callback.checkpoint(directory, update))

    def phase(self, name: str, done: int, total: int) -> None:
        self._notify("phase", lambda callback: callback.phase(name, done, total))

    def interval(self, row: Mapping[str, Any]) -> None:
        self._notify("interval", lambda callback: callback.interval(MappingProxyType(dict(row))))

    def message(self, line: str) -> None:
        self._notify("message", lambda callback: callback.message(line))

    def _notify(self, event: str, notify: Callable[[Callback], None]) -> None:
        """Call each callback. Switch off one that fails and request a stop: state is whole only between updates."""
        for name, callback in list(self._members.items()):
            error = _raised_by(notify, callback)
            if isinstance(error, TreadleError):
                raise error
            if error is not None:
                del self._members[name]
                self.stop.request(raised(f"callback {name}: {event}", error), error)
        if self._progress is not None:
            notify(self._progress)


def load_callbacks(configs: Sequence[CallbackConfig], own: Sequence[Callback] = ()) -> dict[str, Callback]:
    """Return name -> callback: those configured, then the user's `own`. Raises ConfigError."""
    members = {config.name: _load(config) for config in configs}
    if len(members) < len(configs):
        names = ", ".join(config.name for config in configs)
        raise ConfigError(f"callbacks: {names}: each may be there once")
    for number, callback in enumerate(own, 1):
        members[f"{type(callback).__qualname__} ({number} of callbacks=)"] = callback
    for name, callback in members.items():
        _check(name, callback)
    return members


def _load(config: CallbackConfig) -> Callback:
    make = resolve("callbacks", config.name)
    try:
        inspect.signature(make).bind(**config.options)
    except TypeError as error:
        raise ConfigError(f"callbacks: {config.name!r} is called with its options, but: {error}") from error
    made: Callback = make(**config.options)
    return made


def _check(name: str, callback: object) -> None:
    if isinstance(callback, type) or not isinstance(callback, Callback):
        raise ConfigError(f"callbacks: {name!r} made {callback!r}, which is no treadle.Callback; subclass that")
    waiting = [event for event in EVENTS if inspect.iscoroutinefunction(getattr(callback, event))]
    if waiting:
        raise ConfigError(f"callbacks: {name!r} has async methods ({', '.join(waiting)}); write them as plain ones")


def _start(name: str, callback: Callback, run: RunStart) -> None:
    error = _raised_by(lambda callback: callback.start(run), callback)
    if isinstance(error, TreadleError):
        raise error
    if error is not None:
        raise RunError(raised(f"callback {name}: start", error)) from error


def _end(
    started: Mapping[str, Callback], run: RunStart, summary: Mapping[str, Any] | None, error: BaseException | None
) -> None:
    for name, callback in started.items():
        own = _raised_by(lambda callback: callback.end(summary, error), callback)
        if own is not None:
            run.log(raised(f"callback {name}: end", own))


def _raised_by(tell: Callable[[Callback], None], callback: Callback) -> BaseException | None:
    """Return what the callback raises, if anything: user code's exceptions are caught here, and only here."""
    try:
        tell(callback)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # attributed by the caller
        return error
    return None
