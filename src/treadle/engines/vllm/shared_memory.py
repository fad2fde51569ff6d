"""Weights on their way to servers on this machine: one safetensors file in shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from treadle.core.trainer import WeightSource
from treadle.engines.staging import StagedFile, WeightsFile, stage_file
from treadle.engines.vllm.server import Server, on_each


@dataclass(frozen=True, slots=True)
class StagedInFile:
    """Holds staged weights in a file (a `Staged`)."""

    file: StagedFile

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.file.shapes

    async def load(self, servers: Sequence[Server], label: str) -> None:
        await on_each(servers, lambda server: server.load({"path": str(self.file.path)}, label))

    def discard(self) -> None:
        self.file.discard()


class SharedMemory:
    """Transfers weights by such files, which servers of other users can read. dtype: of the servers' weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    async def connect(self, servers: Sequence[Server]) -> None:
        """Have the servers forget which weights they took before. Raises EngineError."""
        await on_each(servers, lambda server: server.post("/init_weight_transfer_engine", {"init_info": {}}))

    async def stage(self, source: WeightSource) -> StagedInFile:
        file = WeightsFile(self._dtype, None, private=False, remedy="set engine.options.transfer=collective")
        return StagedInFile(await stage_file(source, file))

    def close(self) -> None:
        """Do nothing: there are no connections."""
