"""Environments by name, and the checks that generators of tasks share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from treadle.core import registry
from treadle.core.errors import ConfigError, DataError
from treadle.core.rewards import is_finite
from treadle.envs.base import Environment

SPLITS = ("train", "held_out")

_METHODS = {"reset": "task", "step": "text", "close": ""}  # name -> what it takes besides self


_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def load_environment(name: str, options: Mapping[str, Any] = _NO_OPTIONS) -> Callable[[], Environment]:
    """Return the environment class `name` (registered, or `module:attribute`), checked before anything runs.

    options: what it is made with; with any, what makes such environments is returned.

    Raises ConfigError: unknown name, not a class, a constructor that needs arguments or does not take the options, or
    one of `reset`, `step` and `close` missing.
    """
    found = check_environment(registry.resolve("environments", name), name, options)
    return partial(found, **options) if options else found


def check_environment(found: object, name: str, options: Mapping[str, Any] = _NO_OPTIONS) -> type[Environment]:
    """Return the class, if it is an environment's. Raises ConfigError as `load_environment` does."""
    if not inspect.isclass(found):
        raise ConfigError(f"environments: {name!r} is of type {type(found).__name__}, it must be a class")
    for method, argument in _METHODS.items():
        written = getattr(found, method, None)
        if callable(written) and written is not Environment.step:
            continue
        arguments = f"self, {argument}" if argument else "self"
        raise ConfigError(
            f"environments: {name!r}: {method} is missing; write 'def {method}({arguments})', async or not"
        )
    signature = inspect.signature(found)
    try:
        signature.bind(**options)
    except TypeError as error:
        if options:
            takes = ", ".join(signature.parameters) or "none"
            raise ConfigError(
                f"environment_options of {name!r}: {error}; its options are {takes}, given: {', '.join(options)}"
            ) from error
        raise ConfigError(
            f"environments: {name!r} is made without arguments, one for each attempt, but its constructor "
            f"says: {error}; give it a default, or read it from the task's extras in 'reset'"
        ) from error
    return cast(type[Environment], found)


def made_class(factory: object) -> object:
    """Return the class of the environments that are made with options; anything else as it is."""
    while isinstance(factory, partial):
        factory = factory.func
    return factory


def check_split(split: str) -> None:
    """Raise DataError unless `split` is `train` or `held_out`."""
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}; write {' or '.join(map(repr, SPLITS))}")


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text, for lists of names."""
    return tuple(text.split())


def check_count(count: int) -> None:
    """Raise ConfigError unless `count` is a whole number >= 0."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(f"count must be a whole number >= 0, got {count!r}")


def check_positive(name: str, value: float, whole: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number above 0, or a whole one."""
    if isinstance(value, bool) or not is_finite(value) or value <= 0 or (whole and not isinstance(value, int)):
        raise ConfigError(f"{name} must be a {'whole ' if whole else ''}number above 0, got {value!r}")


def check_share(name: str, value: float) -> None:
    """Raise ConfigError unless `value` lies in [0, 1]."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is a share and must lie between 0 and 1, got {value!r}")
