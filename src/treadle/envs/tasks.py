"""Environments by name, and checks that options and generators of tasks share."""

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
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

_METHODS = {"reset": "self, task", "step": "self, text", "close": "self"}


def load_environment(name: str, options: Mapping[str, Any] = NO_OPTIONS) -> Callable[[], Environment]:
    """Return what makes environments of class `name` (registered, or `module:attribute`) with the options.

    Raises ConfigError: unknown name, not a class, a constructor that does not take the options or needs more, or one of
    `reset`, `step` and `close` missing.
    """
    environment = check_environment(registry.resolve("environments", name), name, options)
    return partial(environment, **options) if options else environment


def check_environment(candidate: object, name: str, options: Mapping[str, Any] = NO_OPTIONS) -> type[Environment]:
    """Return the class, if it is an environment's. Raises ConfigError as `load_environment` does."""
    if not inspect.isclass(candidate):
        raise ConfigError(f"environments: {name!r} is of type {type(candidate).__name__}, it must be a class")
    for method, arguments in _METHODS.items():
        written = getattr(candidate, method, None)
        if not callable(written) or written is Environment.step:
            raise ConfigError(
                f"environments: {name!r}: {method} is missing; write 'def {method}({arguments})', async or not"
            )
    signature = inspect.signature(candidate)
    try:
        signature.bind(**options)
    except TypeError as error:
        takes, got = ", ".join(signature.parameters) or "none", ", ".join(options) or "none"
        where = f"environment_options of {name!r}"
        raise ConfigError(f"{where}: {error}; its options are {takes}, given: {got}") from error
    return cast(type[Environment], candidate)


def made_class(factory: object) -> object:
    """Return the class of the environments that are made with options; anything else as it is."""
    while isinstance(factory, partial):
        factory = factory.func
    return factory


def split_key(split: str, count: int, seed: int = 0) -> str:
    """Return the key of a split's draws, which held-out tasks share for all seeds: `train/3`, `held_out`.

    Raises DataError for a split other than `train` and `held_out`, ConfigError for a `count` that is no whole number
    >= 0.
    """
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}; write {' or '.join(map(repr, SPLITS))}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(f"count must be a whole number >= 0, got {count!r}")
    return split if split == "held_out" else f"{split}/{seed}"


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text, for lists of names."""
    return tuple(text.split())


def check_positive(name: str, value: float, whole: bool = False) -> None:
    """Raise ConfigError unless `value` is a finite number above 0, or a whole one."""
    if isinstance(value, bool) or not is_finite(value) or value <= 0 or (whole and not isinstance(value, int)):
        raise ConfigError(f"{name} must be a {'whole ' if whole else ''}number above 0, got {value!r}")


def check_share(name: str, value: float) -> None:
    """Raise ConfigError unless `value` lies in [0, 1]."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name} is a share and must lie between 0 and 1, got {value!r}")
