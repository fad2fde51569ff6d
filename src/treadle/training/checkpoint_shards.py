"""Tensors in files that each rank writes for itself, and reading them on any number of ranks.

    optimizer.safetensors                                     what one process writes
    optimizer/shard-00001-model-00001-of-00001.safetensors    what rank 0 of several writes: shards, and their places
    optimizer/shard-00002-model-00001-of-00001.safetensors    what rank 1 writes

Both are read alike: a rank reads those ranges of the files that it needs. Files are of PyTorch's distributed checkpoint
(DCP) in the format of Hugging Face; nothing is pickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from treadle.core.errors import CheckpointError
from treadle.core.files import sync_directory, sync_file
from treadle.core.manifest import Manifest
from treadle.training.ranks import Ranks


def write_shards(directory: Path, part: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Write this rank's shards of the tensors durably, beside the other ranks'; returns file name -> SHA-256.

    All ranks do this together. A tensor that is not sharded is written once. Raises OSError.
    """
    if not tensors:
        return _write_none(directory / f"{part}.safetensors", ranks)
    folder = directory / part
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    _raising_os_error(lambda: save(dict(tensors), storage_writer=writer))
    own = {f"{part}/{file.name}": sync_file(file) for file in sorted(folder.glob(f"shard-{ranks.rank + 1:05d}-*"))}
    sync_directory(folder)
    return own


def _write_none(path: Path, ranks: Ranks) -> dict[str, str]:
    if ranks.rank:
        return {}
    save_file({}, path)
    return {path.name: sync_file(path)}


class TensorSource(Protocol):
    """Provides tensors, of which the whole shapes are known before they are read."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]: ...

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Read the tensors of these names in place, each of which may be sharded; all ranks do this together."""
        ...


class InMemory:
    """Holds tensors that have been read already (a `TensorSource`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(self._tensors[name])


class TensorFiles:
    """Reads the tensors of one part of a checkpoint from the files that one process or several wrote (`TensorSource`).

    The files are checked when this is made. Raises DamageError for those that are damaged or missing, RemovedError
    without the directory.
    """

    def __init__(self, checkpoint: Manifest, part: str, ranks: Ranks) -> None:
        single = f"{part}.safetensors"
        names = sorted(name for name in checkpoint.sha256 if name == single or name.startswith(f"{part}/")) or [single]
        ranks.every(lambda: checkpoint.prove(names[ranks.rank :: ranks.size]))
        self._files = [str(checkpoint.directory / name) for name in names]
        self._ranks = ranks
        described: dict[str, Any] = self._reader().read_metadata().state_dict_metadata
        self.shapes: dict[str, torch.Size] = {name: each.size for name, each in described.items()}

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Read those ranges of the files that this rank has of the tensors."""
        if not tensors:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be, of one rank
            load(dict(tensors), storage_reader=self._reader(), no_dist=self._ranks.size == 1)

    def _reader(self) -> HuggingFaceStorageReader:
        reader = HuggingFaceStorageReader(".")
        reader.fs = _Files(self._files)
        return reader


class _Files(FileSystem):
    """Lists certain files, whatever the directory."""

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__()
        self._files = list(files)

    def ls(self, path: Any) -> list[str]:
        return self._files


def _raising_os_error(write: Callable[[], object]) -> None:
    """Raise OSError for what the disk refused on any rank, which DCP reports to all of them in its own way."""
    try:
        write()
    except CheckpointException as error:
        failures = list(error.failures.values())
        cause = failures[0][0]
        if not all(isinstance(each, OSError | SafetensorError) for each, _ in failures):
            raise CheckpointError(f"the checkpoint could not be written: {cause!r}") from error
        raise OSError(str(cause)) from error
