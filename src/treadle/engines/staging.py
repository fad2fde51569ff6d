"""Where engines find published weights: in this process, or in a file in shared memory that other processes read."""

from __future__ import annotations

import os
import shutil
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
from treadle.engines.temporary import temporary_directory, with_key
from treadle.models.tensor_file import write_tensors

_SHARED_MEMORY = Path("/dev/shm")


class InProcess:
    """Hands an engine in this process the tensors by name, without copying them (a `WeightsDestination`)."""

    def write(self, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return dict(weights)


class Staged(Protocol):
    """Weights for engines in other processes, which get a copy of this object, until they are discarded."""

    async def fetch(self) -> Mapping[str, Tensor]:
        """Return the weights by name, in the process of an engine. Raises EngineError."""
        ...

    def discard(self) -> None:
        """Release them. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class StagedFile:
    """Weights in a file, until they are discarded. shapes: by name."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    async def fetch(self) -> Mapping[str, Tensor]:
        """Read the file."""
        return load_file(self.path)

    def discard(self) -> None:
        """Remove the file. Idempotent."""
        shutil.rmtree(self.path.parent, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """Writes weights to one safetensors file, complete or absent (a `WeightsDestination`).

    dtype: that floating-point weights are written in; None: their own. directory: where it lies; None: in shared
    memory, or with temporary files where that lacks room or does not exist. private: other users of the machine cannot
    read it. remedy: ends the message about a file that cannot be written. key: of the directory made for it alone.
    """

    dtype: torch.dtype | None = None
    directory: str | None = None
    private: bool = True
    remedy: str = "make room there, or set TMPDIR"
    key: str = field(default_factory=lambda: uuid4().hex)

    def write(self, described: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> StagedFile:
        """Write the file, in the process that has the weights, one after the other. Raises EngineError."""
        written = {name: _as_written(tensor, self.dtype) for name, tensor in described.items()}
        folder = self._folder(sum(tensor.numel() * tensor.element_size() for tensor in written.values()))
        try:
            path = temporary_directory(folder, self.key, 0o700 if self.private else 0o777) / "weights.safetensors"
            write_tensors(
                path, written, ((name, to_host(tensor, self.dtype)) for name, tensor in weights), {"format": "pt"}
            )
        except OSError as error:
            raise EngineError(f"could not write weights to {folder}: {error}; {self.remedy}") from error
        return StagedFile(path, {name: tuple(tensor.shape) for name, tensor in written.items()})

    def discard(self) -> None:
        """Remove what was written of the file."""
        for folder in self._folders():
            for directory in with_key(folder, self.key):
                shutil.rmtree(directory, ignore_errors=True)

    def _folders(self) -> Iterator[Path]:
        if self.directory is not None:
            yield Path(self.directory)
            return
        if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
            yield _SHARED_MEMORY
        yield Path(tempfile.gettempdir())

    def _folder(self, size: int) -> Path:
        *preferred, last = self._folders()
        return next((folder for folder in preferred if shutil.disk_usage(folder).free > 2 * size), last)


async def stage_file(source: WeightSource, file: WeightsFile) -> StagedFile:
    """Return the file with the source's published weights; nothing is left of one that fails. Raises EngineError."""
    try:
        return await source.stage(file)
    except BaseException:
        file.discard()
        raise


def _as_written(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return type and shape of what `to_host` makes of a tensor, in no memory."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind, device="meta")


def to_host(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor on the CPU, contiguous, a floating-point one in `dtype`; no copy if it is all this already."""
    return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
