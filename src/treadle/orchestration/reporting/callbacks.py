"""Following a run: the events that a user's code and the trackers get while it trains.

    start -> publish -> [evaluate] -> checkpoint
          -> (rollout ... -> batch -> update ... -> publish -> [evaluate] -> [checkpoint]) ...
          -> [checkpoint] -> [evaluate] -> end

With `orchestration.max_staleness` above 0, `rollout` comes at any time in between; `phase`, `interval` and `message`
always may.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from treadle.core.errors import ConfigError, RunError, TreadleError
from treadle.core.registry import resolve
from treadle.core.types import Group, Trajectory
from treadle.orchestration.config import CallbackConfig, RunConfig
from treadle.orchestration.reporting.metrics import EvaluationResult
from treadle.orchestration.stopping import StopRequest
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.rollout.isolation.user_code import raised


@dataclass(frozen=True, slots=True)
class RunStart:
    """What a callback gets at the start of a run.

    update: number of the last update already made; 0 in a new run. log: adds a line to the run's output.
    """

    directory: Path
    config: RunConfig
    update: int
    log: Callable[[str], None]


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
        """End of the run, or its interruption: with its summary, or with an error.

        An exception in this method only becomes a line of output.
        """


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
        """Start the callbacks and do the work; returns its summary. Those that were started get `end` in any case.

        Raises RunError if a callback cannot start, and what `work` raises.
        """
        started: dict[str, Callback] = {}
        try:
            for name, callback in self._members.items():
                started[name] = callback
                error = _raised_by(callback.start, run)
                if isinstance(error, TreadleError):
                    raise error
                if error is not None:
                    raise RunError(raised(f"callback {name}: start", error)) from error
            summary = work()
        except BaseException as error:
            _end(started, run, None, error)
            raise
        _end(started, run, MappingProxyType(summary), None)
        return summary

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


def _passing_on(event: str) -> Callable[..., None]:
    def method(self: Callbacks, *arguments: Any) -> None:
        self.notify(event, *arguments)

    return method


for _event in EVENTS[1:-1]:  # `around` calls `start` and `end`
    setattr(Callbacks, _event, _passing_on(_event))


def load_callbacks(configs: Sequence[CallbackConfig], instances: Sequence[Callback] = ()) -> dict[str, Callback]:
    """Return name -> callback: those configured, then the user's `instances`. Raises ConfigError."""
    members: dict[str, Callback] = {}
    for config in configs:
        if config.name in members:
            raise ConfigError(f"callbacks: {config.name!r} is listed twice; keep one")
        make = resolve("callbacks", config.name)
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
        waiting = [event for event in EVENTS if inspect.iscoroutinefunction(getattr(callback, event))]
        if waiting:
            raise ConfigError(f"callbacks: {name!r} has async methods ({', '.join(waiting)}); write plain ones")
    return members


def _end(
    started: Mapping[str, Callback], run: RunStart, summary: Mapping[str, Any] | None, error: BaseException | None
) -> None:
    for name, callback in started.items():
        if (problem := _raised_by(callback.end, summary, error)) is not None:
            run.log(raised(f"callback {name}: end", problem))


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
