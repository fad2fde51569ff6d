"""Following a run: what a user's code and the trackers are told while it trains.

    start -> publish -> [evaluate] -> checkpoint
          -> (rollout ... -> batch -> update ... -> publish -> [evaluate] -> [checkpoint]) ...
          -> [checkpoint] -> [evaluate] -> end

With `orchestration.max_staleness` above 0 `rollout` comes at any time in between; `phase` and `message` always may.
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
    """What a callback is told first.

    update: updates that the run goes on after; 0 in a new one. say: puts a line into the run's output.
    """

    directory: Path
    config: RunConfig
    update: int
    say: Callable[[str], None]


@runtime_checkable
class Callback(Protocol):
    """Follows a run. Subclass it and write the methods you want; the others do nothing.

    All are called on the thread of the run's event loop, which waits for them: return soon. What they are given is
    read-only, and nothing they return is looked at: a callback cannot change what is trained. What `start` raises ends
    the run before it begins. What another method raises switches the callback off and stops the run after the update
    it is at, with a checkpoint; but a TreadleError stops it at once.
    """

    def start(self, run: RunStart) -> None:
        """Before anything is computed, also when a run is resumed."""
        return

    def rollout(self, trajectory: Trajectory) -> None:
        """A training attempt has finished and is on record."""
        return

    def batch(self, groups: Sequence[Group], version: int) -> None:
        """These groups will be trained now, on the weights of this version."""
        return

    def update(self, row: Mapping[str, Any]) -> None:
        """An optimizer update was made; `row` is its line of metrics.jsonl."""
        return

    def publish(self, version: int) -> None:
        """The engine samples with the weights of this version."""
        return

    def evaluate(self, result: EvaluationResult) -> None:
        """Held-out tasks were played."""
        return

    def checkpoint(self, directory: Path, update: int) -> None:
        """A checkpoint after this update is complete; later ones remove it, as `orchestration.keep_last` says."""
        return

    def phase(self, name: str, done: int, total: int) -> None:
        """A phase (rollout, update, evaluation) has `done` of its `total` equal pieces; 0: it begins."""
        return

    def message(self, line: str) -> None:
        """The run says something: what failed for the first time, which task is left out."""
        return

    def end(self, summary: Mapping[str, Any] | None, error: BaseException | None) -> None:
        """The run ends, or is left to be resumed, with its summary or with an error. What this raises is only told."""
        return


EVENTS = ("start", "rollout", "batch", "update", "publish", "evaluate", "checkpoint", "phase", "message", "end")


class JsonLines(Callback):
    """metrics.jsonl: one line per update and per evaluation. Every run has it."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def update(self, row: Mapping[str, Any]) -> None:
        """One line."""
        self._run.log(dict(row))

    def evaluate(self, result: EvaluationResult) -> None:
        """One line."""
        self._run.log({"kind": "evaluation", **asdict(result)})


class Callbacks(Callback):
    """Tells each of `members` (name -> callback) in their order, and attributes, once, what one of them raises."""

    def __init__(self, members: Mapping[str, Callback], stop: StopRequest) -> None:
        self._members, self.stop = dict(members), stop

    def around(self, run: RunStart, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The summary that `work` returns. Those that were started are told of the end, whatever it is.

        Raises RunError where one cannot start, and what `work` raises.
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
        """Tell them."""
        self._tell("rollout", lambda callback: callback.rollout(trajectory))

    def batch(self, groups: Sequence[Group], version: int) -> None:
        """Tell them."""
        self._tell("batch", lambda callback: callback.batch(tuple(groups), version))

    def update(self, row: Mapping[str, Any]) -> None:
        """Tell them."""
        self._tell("update", lambda callback: callback.update(MappingProxyType(dict(row))))

    def publish(self, version: int) -> None:
        """Tell them."""
        self._tell("publish", lambda callback: callback.publish(version))

    def evaluate(self, result: EvaluationResult) -> None:
        """Tell them."""
        self._tell("evaluate", lambda callback: callback.evaluate(deepcopy(result)))

    def checkpoint(self, directory: Path, update: int) -> None:
        """Tell them."""
        self._tell("checkpoint", lambda callback: callback.checkpoint(directory, update))

    def phase(self, name: str, done: int, total: int) -> None:
        """Tell them."""
        self._tell("phase", lambda callback: callback.phase(name, done, total))

    def message(self, line: str) -> None:
        """Tell them."""
        self._tell("message", lambda callback: callback.message(line))

    def _tell(self, event: str, tell: Callable[[Callback], None]) -> None:
        """A callback that fails is switched off, and the run asked to stop: its state is whole only between updates."""
        for name, callback in list(self._members.items()):
            error = _raised_by(tell, callback)
            if isinstance(error, TreadleError):
                raise error
            if error is not None:
                del self._members[name]
                self.stop.request(raised(f"callback {name}: {event}", error), error)


def load_callbacks(configs: Sequence[CallbackConfig], own: Sequence[Callback] = ()) -> dict[str, Callback]:
    """Name -> callback: those configured, then one's `own`. Raises ConfigError."""
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
            run.say(raised(f"callback {name}: end", own))


def _raised_by(tell: Callable[[Callback], None], callback: Callback) -> BaseException | None:
    """Foreign code: whatever it raises is caught here, and only here."""
    try:
        tell(callback)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # attributed by whoever asked
        return error
    return None
