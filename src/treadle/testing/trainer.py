"""`FakeTrainer`: a trainer without a model, public, for tests and simulations of the loop. Needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from treadle.core.engine import ComponentStatus
from treadle.core.files import Manifest
from treadle.core.metrics import Measures
from treadle.core.trainer import Conversation, ModelInfo, UpdateResult, WeightsDestination
from treadle.core.types import Floats, Group, Ids, Routing

R = TypeVar("R")


class FakeTrainer:
    """Makes one update a batch, which takes `seconds` and changes nothing; there are no weights to publish or save.

    on_batch: called with the groups of each batch, before the update takes its time. logprob: of every token.
    """

    checkpoint_bytes = 0
    model = ModelInfo(vocabulary=2**31 - 1, context=2**31 - 1, parameters=0, shapes=MappingProxyType({}))

    def __init__(
        self,
        seconds: float = 0.0,
        on_batch: Callable[[Sequence[Group]], object] = lambda groups: None,
        *,
        logprob: float = -0.5,
    ) -> None:
        self._seconds, self._on_batch, self._logprob = seconds, on_batch, logprob

    async def train_batch(self, groups: Sequence[Group]) -> list[UpdateResult]:
        """Wait for `seconds`; returns one update without metrics."""
        self._on_batch(groups)
        await asyncio.sleep(self._seconds)
        return [UpdateResult(Measures(), {})]

    async def supervised_step(self, conversations: Sequence[Conversation], step: int) -> float:
        """Learn nothing; returns a loss of 0."""
        return 0.0

    async def stage(self, destination: WeightsDestination[R]) -> R:
        """Have no weights written."""
        return destination.write({}, ())

    async def score(self, ids: Ids) -> Floats:
        """Return `logprob` for every token but the first."""
        return np.full(len(ids) - 1, self._logprob, np.float32)

    async def experts(self, ids: Ids) -> Routing:
        """Return no layer's: it has none."""
        return np.empty((len(ids), 0, 0), np.int16)

    async def export(self, directory: Path, more: Mapping[str, bytes] | None = None) -> None:
        """Write nothing."""

    async def digest(self) -> str:
        """Return "": there are no weights."""
        return ""

    async def save(self, directory: Path) -> str:
        """Write nothing; returns ""."""
        return ""

    async def load(self, saved: Manifest) -> None:
        """Read nothing."""

    def status(self) -> list[ComponentStatus]:
        """Return that it has nothing to report."""
        return []

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
