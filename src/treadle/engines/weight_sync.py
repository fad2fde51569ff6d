"""`WeightSync` for engines that run Treadle's own code. For vLLM's servers: `engines.vllm.publication`."""

from __future__ import annotations

from dataclasses import dataclass

from safetensors.torch import load_file

from treadle.core.trainer import WeightSource
from treadle.engines.remote import RemoteEngine
from treadle.engines.staging import InProcess, WeightsFile, stage_file
from treadle.engines.torch.pinned import LocalEngine


@dataclass(frozen=True, slots=True)
class EmbeddedSync:
    """Publishes to an engine in this process, between two tokens. Mismatched weights change nothing.

    by_file: whether the source's tensors are in other processes, and come by a file in shared memory.
    """

    source: WeightSource
    engine: LocalEngine
    by_file: bool = False

    async def publish(self, version: int) -> None:
        if not self.by_file:
            await self.engine.update_weights(await self.source.stage(InProcess()), version)
            return
        file = await stage_file(self.source, WeightsFile())
        try:
            await self.engine.update_weights(load_file(file.path), version)
        finally:
            file.discard()


@dataclass(frozen=True, slots=True)
class SharedMemorySync:
    """Publishes to an engine in another process by a file in shared memory, kept for a process that may replace it.

    Weights that do not fit, or cannot be written, change nothing.
    """

    source: WeightSource
    engine: RemoteEngine

    async def publish(self, version: int) -> None:
        await self.engine.update_weights(lambda: stage_file(self.source, WeightsFile()), version)
