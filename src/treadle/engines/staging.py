"""Published weights for engines: in this process, or in a shared-memory file for other processes.

Directories for weights live as long as the process that made them; those of killed processes are removed by others.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch
from safetensors.torch import load_file
from torch import Tensor

from treadle.core.errors import EngineError
from treadle.core.trainer import WeightSource
from treadle.models.tensor_file import write_tensors

_SHARED_MEMORY = Path("/dev/shm")
_KIND = "treadle_weights-"
_PREFIX = f"{_KIND}{socket.gethostname()}-"


class InProcess:
    """Hands tensors by name to an engine in this process, without copying them (a `WeightsDestination`)."""

    def write(self, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return dict(weights)


class Staged(Protocol):
    """Weights for engines in other processes until they are discarded; each process gets a copy of this object."""

    async def fetch(self) -> Mapping[str, Tensor]:
        """Return the weights by name; called in an engine's process. Raises EngineError."""

    def discard(self) -> None:
        """Release them. Idempotent."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """Weights in a file, until they are discarded. shapes: shapes by name."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    async def fetch(self) -> Mapping[str, Tensor]:
        return load_file(self.path)

    def discard(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """Writes weights to one safetensors file, complete or absent (a `WeightsDestination`).

    The file is in shared memory, or among temporary files if that is full or missing.

    dtype: dtype of floating-point weights; None: unchanged. private: whether to hide it from other users of the
    machine.
    remedy: end of the message about a file that cannot be written. key: key of its directory.
    """

    dtype: torch.dtype | None = None
    private: bool = True
    remedy: str = "make room there, or set TMPDIR"
    key: str = field(default_factory=lambda: uuid4().hex)

    def write(self, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> StagedFile:
        """Write the file tensor by tensor, in the process that has the weights. Raises EngineError."""
        written = {
            name: torch.empty(tensor.shape, dtype=_dtype_of(tensor, self.dtype), device="meta")
            for name, tensor in described.items()
        }
        size = sum(tensor.numel() * tensor.element_size() for tensor in written.values())
        *preferred, last = _folders()
        folder = next((folder for folder in preferred if shutil.disk_usage(folder).free > 2 * size), last)
        try:
            path = temporary_directory(folder, self.key, 0o700 if self.private else 0o777) / "weights.safetensors"
            write_tensors(
                path, written, ((name, to_host(tensor, self.dtype)) for name, tensor in weights), {"format": "pt"}
            )
        except OSError as error:
            raise EngineError(
                f"could not write weights to {folder}: {error.strerror or error}; {self.remedy}"
            ) from error
        return StagedFile(path, {name: tuple(tensor.shape) for name, tensor in written.items()})

    def discard(self) -> None:
        for folder in _folders():
            for directory in folder.glob(f"{_KIND}*-{self.key}"):  # made by any process
                shutil.rmtree(directory, ignore_errors=True)


def _folders() -> Iterator[Path]:
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        yield _SHARED_MEMORY
    yield Path(tempfile.gettempdir())


async def stage_file(source: WeightSource, file: WeightsFile) -> StagedFile:
    """Return the file with the source's published weights; removes it after a failure. Raises EngineError."""
    try:
        return await source.stage(file)
    except BaseException:
        file.discard()
        raise


def to_host(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor on the CPU, contiguous, floating-point ones in `dtype`; copies only if necessary."""
    return tensor.detach().to("cpu", _dtype_of(tensor, dtype)).contiguous()


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def temporary_directory(folder: Path, key: str = "", mode: int = 0o700) -> Path:
    """Make a directory that lasts no longer than this process, and remove those of killed processes.

    key: unique key. mode: permissions; default: this user only.
    """
    for path in folder.glob(f"{_PREFIX}*-*"):
        if not is_running(int(path.name.removeprefix(_PREFIX).split("-")[0])):
            shutil.rmtree(path, ignore_errors=True)
    directory = folder / f"{_PREFIX}{os.getpid()}-{key or uuid4().hex}"
    directory.mkdir(mode=mode)
    return directory


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie, which keeps its number, does not count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # belongs to another user
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        # Just ended, or the system has no /proc.
        return not Path("/proc/self/stat").exists()
    return stat.rpartition(")")[2].split()[0] not in "ZX"
