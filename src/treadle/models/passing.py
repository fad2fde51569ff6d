"""What a forward pass hands to a model's layers: hung on them, since models drop keyword arguments on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from torch import nn

from treadle.core.errors import ConfigError

T = TypeVar("T")

_NAME = "_treadle_passing"


class Passing(Generic[T]):
    """Hands `current` to the layers of a model.

    It is no context variable: a backward pass that computes layers again may run in another thread.
    """

    def __init__(self) -> None:
        self.current: T | None = None

    def hang(self, model: nn.Module) -> list[nn.Module]:
        """Hang it on all numbered layers; returns them."""
        layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
        for layer in layers:
            vars(layer)[_NAME] = self
        return layers

    @contextmanager
    def through(self, model: nn.Module) -> Iterator[None]:
        layers = self.hang(model)
        try:
            yield
        finally:
            self.current = None
            for layer in layers:
                del vars(layer)[_NAME]


def handed(layer: nn.Module) -> Any:
    """Return what the current forward pass hands to a layer. Raises ConfigError if it cannot be found from there."""
    passing = vars(layer).get(_NAME)
    if passing is None or passing.current is None:
        raise ConfigError(f"{type(layer).__name__} has no layer_idx: what belongs to a forward pass does not reach it")
    return passing.current
