"""`WeightSync` for engines that run Treadle's own code. That of vLLM's servers: `engines.vllm.publication`."""

from __future__ import annotations

from dataclasses import dataclass

from safetensors.torch import load_file

from treadle.core.trainer import WeightSource
from treadle.engines.remote import RemoteEngine
from treadle.engines.staging import InProcess, WeightsFile, stage_file
from treadle.engines.torch.engine import TorchEngine


@dataclass(frozen=True, slots=True)
class EmbeddedSync:
    """Publishes to an engine in this process, which copies the trainer's own tensors between two tokens."""

    source: WeightSource
    engine: TorchEngine

    async def publish(self, version: int) -> None:
        """Make the engine serve the trainer's weights as this version. Weights that do not fit change nothing."""
        await self.engine.update_weights(await self.source.stage(InProcess()), version)


@dataclass(frozen=True, slots=True)
class FileSync:
    """Publishes to an engine in this process what a trainer in others has, by a file in shared memory."""

    source: WeightSource
    engine: TorchEngine

    async def publish(self, version: int) -> None:
        """Make the engine serve the trainer's weights as this version.

        Weights that do not fit, or cannot be written, change nothing.
        """
        file = await stage_file(self.source, WeightsFile())
        try:
            await self.engine.update_weights(load_file(file.path), version)
        finally:
            file.discard()


@dataclass(frozen=True, slots=True)
class SharedMemorySync:
    """Publishes to an engine in another process by a file in shared memory, kept for a process that may replace it."""

    source: WeightSource
    engine: RemoteEngine

    async def publish(self, version: int) -> None:
        """Make the engine serve the trainer's weights as this version.

        Weights that do not fit, or cannot be written, change nothing.
        """
        await self.engine.update_weights(lambda: stage_file(self.source, WeightsFile()), version)
