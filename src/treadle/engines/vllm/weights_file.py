"""Weights on their way to servers on this machine: one safetensors file in shared memory."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from treadle.core.errors import EngineError
from treadle.engines.vllm.server import Server, on_each

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = f"treadle-{socket.gethostname()}-"


class WeightsFile:
    """Weights in a file, complete or absent, until `discard`. A server may be sent it again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    async def write(cls, weights: Mapping[str, Tensor], dtype: torch.dtype, directory: str | None) -> WeightsFile:
        """A new file of these weights in that type, written beside the event loop. Raises EngineError."""
        folder = Path(directory or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else tempfile.gettempdir()))
        _remove_orphans(folder)
        path = folder / f"{_PREFIX}{os.getpid()}-{uuid4().hex}.safetensors"
        await asyncio.to_thread(_write, path, weights, dtype)
        return cls(path)

    async def load(self, servers: Sequence[Server], label: str) -> None:
        """Have the servers load it and report this label. Raises EngineError; then they may be half loaded."""
        await on_each(servers, lambda server: server.load({"path": str(self.path)}, label))

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


class SharedMemory:
    """The `Transfer` by such files. dtype: of the servers' weights."""

    def __init__(self, dtype: torch.dtype, directory: str | None) -> None:
        self._dtype, self._directory = dtype, directory

    async def connect(self, servers: Sequence[Server]) -> None:
        """Have the servers forget what weights they took before. Raises EngineError."""
        await on_each(servers, lambda server: server.post("/init_weight_transfer_engine", {"init_info": {}}))

    async def stage(self, weights: Mapping[str, Tensor]) -> WeightsFile:
        """A new file. Raises EngineError."""
        return await WeightsFile.write(weights, self._dtype, self._directory)

    def close(self) -> None:
        """Nothing to drop."""


def _remove_orphans(folder: Path) -> None:
    """Remove files of processes of this machine that ended without discarding them: killed ones."""
    for path in folder.glob(f"{_PREFIX}*-*.*"):
        try:
            os.kill(int(path.name.removeprefix(_PREFIX).split("-")[0]), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except PermissionError:  # somebody else's, and alive
            continue


def _write(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        tensors = {name: to_host(tensor, dtype) for name, tensor in weights.items()}
        save_file(tensors, temporary, {"format": "pt"})
        temporary.replace(path)
    except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
        raise EngineError(f"could not write weights to {path}: {error}; set engine.vllm.shared_directory") from error
    finally:
        temporary.unlink(missing_ok=True)


def to_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In that type if it is a floating-point one, contiguous. Not a copy where it is all of this already."""
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
