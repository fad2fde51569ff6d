"""The callbacks of a run: loaded, notified in order, and disabled when they fail."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field, GetJsonSchemaHandler, model_validator

from treadle.core.config import Config
from treadle.core.errors import ConfigError, RunError, TreadleError
from treadle.core.registry import resolve
from treadle.core.stop import StopRequest
from treadle.core.types import Group, Trajectory
from treadle.core.user_functions import Expected, check_function
from treadle.record.run_directory import RunDirectory
from treadle.report.callback import EVENTS, Callback, RunStart
from treadle.report.metrics import EvaluationResult
from treadle.rollout.isolation.user_code import raised


class CallbackConfig(Config):
    """A tracker or callback of the run. A plain name stands for one without options."""

    name: str = Field(description="a registered name (tensorboard, wandb, trackio, mlflow) or module:attribute")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of its constructor")

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(core_schema), {"type": "string"}]}


class JsonLines(Callback):
    """Writes metrics.jsonl, one line per update and evaluation, and intervals.jsonl. Part of every run."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def update(self, row: Mapping[str, Any]) -> None:
        self._run.log(dict(row))

    def evaluate(self, result: EvaluationResult) -> None:
        self._run.log({"kind": "evaluation", **asdict(result)})

    def interval(self, row: Mapping[str, Any]) -> None:
        self._run.log_interval(dict(row))


class Callbacks(Callback):
    """Passes each event on to `members` (name -> callback) in order, and attributes their errors.

    progress: Treadle's own, called last: its errors are bugs, and end the run.
    """

    def __init__(self, members: Mapping[str, Callback], stop: StopRequest, progress: Callback | None = None) -> None:
        self._members, self.stop, self._progress = dict(members), stop, progress

    def around(self, run: RunStart, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Start the callbacks and do the work; return its summary. Started callbacks always get `end`."""
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

    def rollout(self, trajectory: Trajectory) -> None:
        self._notify("rollout", trajectory)

    def batch(self, groups: Sequence[Group], version: int) -> None:
        self._notify("batch", groups, version)

    def update(self, row: Mapping[str, Any]) -> None:
        self._notify("update", row)

    def publish(self, version: int) -> None:
        self._notify("publish", version)

    def evaluate(self, result: EvaluationResult) -> None:
        self._notify("evaluate", result)

    def checkpoint(self, directory: Path, update: int) -> None:
        self._notify("checkpoint", directory, update)

    def phase(self, name: str, done: int, total: int) -> None:
        self._notify("phase", name, done, total)

    def interval(self, row: Mapping[str, Any]) -> None:
        self._notify("interval", row)

    def message(self, line: str) -> None:
        self._notify("message", line)

    def _notify(self, event: str, *arguments: Any) -> None:
        """Call each callback. Disable one that fails and request a stop: state is consistent only between updates."""
        for name, callback in list(self._members.items()):
            error = _raised_by(getattr(callback, event), *map(_read_only, arguments))
            if isinstance(error, TreadleError):
                raise error
            if error is not None:
                del self._members[name]
                self.stop.request(raised(f"callback {name}: {event}", error), error)
        if self._progress is not None:
            getattr(self._progress, event)(*arguments)


def load_callbacks(configs: Sequence[CallbackConfig], instances: Sequence[Callback] = ()) -> dict[str, Callback]:
    """Return name -> callback: configured ones, then the user's `instances`. Raises ConfigError."""
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
    """Raise ConfigError for a callback without event methods, or with methods that cannot be called as required."""
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
    """Return the callback's error, if any: exceptions of user code are caught here, and only here."""
    try:
        method(*arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # attributed by the caller
        return error
    return None


def _read_only(argument: Any) -> Any:
    """Return a copy of anything that a callback might change."""
    match argument:
        case Mapping():
            return MappingProxyType(dict(argument))
        case list():
            return tuple(argument)
        case EvaluationResult():
            return deepcopy(argument)
    return argument
