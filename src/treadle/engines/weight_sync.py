"""`WeightSync` for engines that run Treadle's own code. That of vLLM's servers: `engines.vllm.publication`."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.core.trainer import WeightSource
from treadle.engines.process.engine import ProcessEngine
from treadle.engines.staging import InProcess, WeightsFile, new_name, stage_file
from treadle.engines.torch.engine import TorchEngine


@dataclass(frozen=True, slots=True)
class EmbeddedSync:
    """The engine of this process copies the trainer's own tensors, between two tokens."""

    source: WeightSource
    engine: TorchEngine

    async def publish(self, version: int) -> None:
        """See `WeightSync`. Weights that do not fit change nothing."""
        await self.engine.update_weights(await self.source.stage(InProcess()), version)


@dataclass(frozen=True, slots=True)
class SharedMemorySync:
    """The engine of another process reads a file in shared memory, which stays for the process that may replace it."""

    source: WeightSource
    engine: ProcessEngine

    async def publish(self, version: int) -> None:
        """See `WeightSync`. Weights that do not fit, or cannot be written, change nothing."""
        await self.engine.update_weights(lambda: stage_file(self.source, WeightsFile(new_name())), version)
