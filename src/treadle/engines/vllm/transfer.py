"""How weights get from the trainer to servers: what `Publication` needs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from treadle.core.trainer import WeightSource
from treadle.engines.vllm.server import Server


class Staged(Protocol):
    """Holds weights as they were when they were staged, to be loaded, more than once, until they are discarded."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each weight, by name."""

    async def load(self, servers: Sequence[Server], label: str) -> None:
        """Have the connected servers load the weights and report this label.

        A server that gets lost is left behind, if that does not hinder the others. Raises EngineError; then servers
        may be half loaded, and are to be connected again.
        """

    def discard(self) -> None:
        """Release the weights. Idempotent."""


class Transfer(Protocol):
    """Brings the weights of a source to servers."""

    async def connect(self, servers: Sequence[Server]) -> None:
        """Prepare these servers for new transfers, whatever they were prepared for before. Raises EngineError."""

    async def stage(self, source: WeightSource) -> Staged:
        """Copy the source's published weights; no server is involved. Raises EngineError."""

    def close(self) -> None:
        """Drop connections. Idempotent."""
