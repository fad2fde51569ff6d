"""How weights get from the trainer to servers: what `Publication` needs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from treadle.core.trainer import WeightSource
from treadle.engines.vllm.server import Server


class Staged(Protocol):
    """Weights as they were when they were staged, ready to be loaded, more than once, until they are discarded."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of each weight, by name."""

    async def load(self, servers: Sequence[Server], label: str) -> None:
        """Have the connected servers load them and report this label.

        A server that gets lost is left behind, if that does not hinder the others. Raises EngineError; then servers
        may be half loaded, and are to be connected again.
        """

    def discard(self) -> None:
        """Release them. Idempotent."""


class Transfer(Protocol):
    """A way for weights."""

    async def connect(self, servers: Sequence[Server]) -> None:
        """Agree with these servers on what is to come, whatever was before. Raises EngineError."""

    async def stage(self, source: WeightSource) -> Staged:
        """Copy the source's published weights; no server is involved. Raises EngineError."""

    def close(self) -> None:
        """Drop connections. Idempotent."""
