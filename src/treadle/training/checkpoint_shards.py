"""Tensors in files written by each rank separately, and reading them on any number of ranks.

    optimizer.safetensors                                     written by a single process
    optimizer/shard-00001-model-00001-of-00001.safetensors    written by rank 0 of several: shards, and their positions
    optimizer/shard-00002-model-00001-of-00001.safetensors    written by rank 1

Both are read alike, and so are the files of a model (`read_sharded`): a rank reads only the ranges that it needs. The
format is PyTorch's distributed checkpoint (DCP) in its Hugging Face variant; nothing is pickled.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from treadle.core.errors import CheckpointError, ConfigError
from treadle.core.files import Manifest, prove_files, sync_directory, sync_file
from treadle.models.model_cache import remedy_for
from treadle.models.weights import saved
from treadle.training.ranks import Ranks


def write_shards(directory: Path, part: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, str]:
    """Write this rank's shards of the tensors durably, beside the other ranks'; return file name -> SHA-256.

    All ranks do this together. An unsharded tensor is written once. Raises OSError.
    """
    if not tensors:
        return _write_none(directory / f"{part}.safetensors", ranks)
    folder = directory / part
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    _raising_os_error(lambda: save(dict(tensors), storage_writer=writer))
    digests = {f"{part}/{file.name}": sync_file(file) for file in sorted(folder.glob(f"shard-{ranks.rank + 1:05d}-*"))}
    sync_directory(folder)
    return digests


def _write_none(path: Path, ranks: Ranks) -> dict[str, str]:
    if ranks.rank:
        return {}
    save_file({}, path)
    return {path.name: sync_file(path)}


class TensorSource(Protocol):
    """Provides tensors with whole shapes known before they are read."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]: ...

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Read the tensors of these names in place, sharded or not; all ranks do this together."""


class InMemory:
    """Tensors already in memory (a `TensorSource`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(self._tensors[name])


class TensorFiles:
    """Reads tensors from safetensors files written by one or several processes (`TensorSource`)."""

    def __init__(self, files: Sequence[Path], ranks: Ranks) -> None:
        self._files, self._ranks = [str(file) for file in files], ranks
        described: dict[str, Any] = self._reader().read_metadata().state_dict_metadata
        self.shapes: dict[str, torch.Size] = {name: each.size for name, each in described.items()}

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended for a single rank
            load(dict(tensors), storage_reader=self._reader(), no_dist=self._ranks.size == 1)

    def _reader(self) -> HuggingFaceStorageReader:
        reader = HuggingFaceStorageReader(".")
        reader.fs = _Files(self._files)
        return reader


def checkpoint_part(checkpoint: Manifest, part: str, ranks: Ranks) -> TensorFiles:
    """Return the tensors of one part of a checkpoint, after the ranks have checked its files, each some of them.

    Raises DamageError for damaged or missing files, RemovedError without the directory.
    """
    single = f"{part}.safetensors"
    names = sorted(name for name in checkpoint.sha256 if name == single or name.startswith(f"{part}/")) or [single]
    ranks.every(lambda: checkpoint.prove(names[ranks.rank :: ranks.size]))
    return TensorFiles([checkpoint.directory / name for name in names], ranks)


def read_sharded(model: nn.Module, directory: Path, ranks: Ranks) -> None:
    """Read a model's weights in place from the directory's safetensors files, each rank its own shards.

    Raises ConfigError for files with other names or shapes than the model, as when transformers converts weights while
    loading; DamageError for files that do not match the directory's manifest.
    """
    names = _weight_files(directory)
    ranks.every(lambda: prove_files(directory, names[ranks.rank :: ranks.size], remedy_for(directory)))
    source, mine = TensorFiles([directory / name for name in names], ranks), saved(model)
    for name, tensor in sorted(mine.items()):
        if source.shapes.get(name) != tensor.shape:
            there = tuple(source.shapes[name]) if name in source.shapes else "absent"
            raise ConfigError(
                f"placement.learner.loading is 'sharded', but {name} is {there} in the files of {str(directory)!r} and "
                f"{tuple(tensor.shape)} in the model; set placement.learner.loading to broadcast"
            )
    source.read_into(mine)


def _weight_files(directory: Path) -> list[str]:
    """Return the names of the safetensors files with a model's weights. Raises ConfigError if there are none."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    if (directory / "model.safetensors").is_file():
        return ["model.safetensors"]
    raise ConfigError(
        f"placement.learner.loading is 'sharded', but {str(directory)!r} has no model.safetensors; set "
        "placement.learner.loading to broadcast"
    )


class _Files(FileSystem):
    """Lists given files, whatever the directory."""

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__()
        self._files = list(files)

    def ls(self, path: Any) -> list[str]:
        return self._files


def _raising_os_error(write: Callable[[], object]) -> None:
    """Raise OSError if the disk refused a write on any rank; DCP reports it to all of them in its own format."""
    try:
        write()
    except CheckpointException as error:
        failures = list(error.failures.values())
        cause = failures[0][0]
        if not all(isinstance(each, OSError | SafetensorError) for each, _ in failures):
            raise CheckpointError(f"the checkpoint could not be written: {cause!r}") from error
        raise OSError(str(cause)) from error
