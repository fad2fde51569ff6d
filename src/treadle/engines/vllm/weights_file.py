"""Weights on their way to servers on this machine: one safetensors file in shared memory."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor

from treadle.core.errors import EngineError
from treadle.engines.vllm.server import Server

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

    async def load(self, server: Server, label: str) -> None:
        """Have the server load it and report this label. Raises EngineError; then the server may be half loaded."""
        await server.post("/start_weight_update")
        await server.post("/update_weights", {"update_info": {"path": str(self.path)}})
        await server.post("/finish_weight_update", {"weight_version": label})

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


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
        tensors = {name: _ready(tensor, dtype) for name, tensor in weights.items()}
        save_file(tensors, temporary, {"format": "pt"})
        temporary.replace(path)
    except OSError as error:
        raise EngineError(f"could not write weights to {path}: {error}; set engine.vllm.shared_directory") from error
    finally:
        temporary.unlink(missing_ok=True)


def _ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
