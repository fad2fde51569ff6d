"""How weights get from the trainer to vLLM's servers: by a file in shared memory, or another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from treadle.core.trainer import WeightSource
from treadle.engines.staging import StagedFile, WeightsFile, stage_file
from treadle.engines.vllm.server import Server, on_each


class Staged(Protocol):
    """Weights as they were when they were staged: loaded once or more often, until they are discarded."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each weight, by name."""

    def discard(self) -> None:
        """Release the weights. Idempotent."""


class Transfer(Protocol):
    """Brings the weights of a source to servers."""

    async def connect(self, servers: Sequence[Server]) -> None:
        """Prepare these servers for new transfers, whatever they were prepared for before. Raises EngineError."""

    async def stage(self, source: WeightSource) -> Staged:
        """Copy the source's published weights; no server is involved. Raises EngineError."""

    async def load(self, staged: Any, servers: Sequence[Server], label: str) -> None:
        """Have the connected servers load what this object staged, and report this label.

        A server that gets lost is left behind, if that does not hinder the others. Raises EngineError; then servers
        may be half loaded, and are to be connected again.
        """

    def close(self) -> None:
        """Drop connections. Idempotent."""


class SharedMemory:
    """Transfers weights by one safetensors file in shared memory, which servers of other users can read.

    dtype: of the servers' weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    async def connect(self, servers: Sequence[Server]) -> None:
        """Have the servers forget which weights they took before. Raises EngineError."""
        await on_each(servers, lambda server: server.post("/init_weight_transfer_engine", {"init_info": {}}))

    async def stage(self, source: WeightSource) -> StagedFile:
        remedy = "set engine.options.transfer=collective"
        return await stage_file(source, WeightsFile(self._dtype, None, private=False, remedy=remedy))

    async def load(self, staged: StagedFile, servers: Sequence[Server], label: str) -> None:
        await on_each(servers, lambda server: server.load({"path": str(staged.path)}, label))

    def close(self) -> None:
        """Do nothing: there are no connections."""
