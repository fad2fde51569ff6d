"""Data that a forward pass hands to a model's layers: attached to them, because models drop keyword arguments."""

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

    Not a context variable: a backward pass that recomputes layers may run in another thread.
    """

    def __init__(self) -> None:
        self.current: T | None = None

    def hang(self, model: nn.Module) -> list[nn.Module]:
        """Attach it to all numbered layers; return them."""
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
    """Return the data that the current forward pass hands to a layer. Raises ConfigError if the layer has none."""
    passing = vars(layer).get(_NAME)
    if passing is None or passing.current is None:
        raise ConfigError(f"{type(layer).__name__} has no layer_idx, so data of a forward pass cannot reach it")
    return passing.current
