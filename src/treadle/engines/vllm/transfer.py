"""How weights get from the trainer to servers: through a file in shared memory, or by `collective.Collective`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from treadle.core.trainer import WeightSource
from treadle.engines.staging import WeightsFile, stage_file
from treadle.engines.vllm.server import Server, on_each


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of weights, to be loaded any number of times until it is discarded.

    shapes: of each weight, by name. load: has the connected servers load them and report a label. A server that gets
    lost is left behind if the others can go on. It raises EngineError; then servers may be half loaded, and must be
    connected again. discard: releases the copy. Idempotent.
    """

    shapes: Mapping[str, tuple[int, ...]]
    load: Callable[[Sequence[Server], str], Awaitable[None]]
    discard: Callable[[], None]


class Transfer(Protocol):
    """Takes weights from a source to servers."""

    async def connect(self, servers: Sequence[Server]) -> None:
        """Prepare these servers for new weights, whatever they were prepared for before. Raises EngineError."""

    async def stage(self, source: WeightSource) -> Staged:
        """Copy the source's published weights; no server is involved. Raises EngineError."""

    def close(self) -> None:
        """Drop connections. Idempotent."""


class SharedMemory:
    """A `Transfer` by a safetensors file, which servers of other users can read.

    dtype: of the servers' weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    async def connect(self, servers: Sequence[Server]) -> None:
        await on_each(servers, lambda server: server.post("/init_weight_transfer_engine", {"init_info": {}}))

    async def stage(self, source: WeightSource) -> Staged:
        remedy = "set engine.options.transfer=collective"
        file = await stage_file(source, WeightsFile(self._dtype, None, private=False, remedy=remedy))

        async def load(servers: Sequence[Server], label: str) -> None:
            await on_each(servers, lambda server: server.load({"path": str(file.path)}, label))

        return Staged(file.shapes, load, file.discard)

    def close(self) -> None:
        pass
