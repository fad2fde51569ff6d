"""Weights on their way to another process of this machine: a safetensors file, in shared memory if there is room."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from treadle.core.errors import EngineError

_PREFIX = f"treadle_weights-{socket.gethostname()}-"


@asynccontextmanager
async def staged(weights: Mapping[str, Tensor]) -> AsyncIterator[Path]:
    """A file that holds these weights while the context lasts, written beside the event loop.

    It lies in a directory of its own, so that nothing is left of a file that was not finished. Raises EngineError.
    """
    directory = new_name(_folder(sum(tensor.numel() * tensor.element_size() for tensor in weights.values())))
    try:
        yield await asyncio.to_thread(_write, directory, weights)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def new_name(folder: Path) -> Path:
    """Of a directory there for as long as this process lives; those of killed processes are removed."""
    _remove_orphans(folder)
    return folder / f"{_PREFIX}{os.getpid()}-{uuid4().hex}"


def _folder(size: int) -> Path:
    """/dev/shm, or the directory for temporary files where that lacks room or does not exist."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 2 * size:
        return memory
    return Path(tempfile.gettempdir())


def _write(directory: Path, weights: Mapping[str, Tensor]) -> Path:
    path = directory / "weights.safetensors"
    try:
        directory.mkdir(mode=0o700)
        # it writes another file first, beside, and renames that
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"could not write weights to {path}: {error}; make room there, or set TMPDIR") from error
    return path


def _remove_orphans(folder: Path) -> None:
    """What processes of this machine left that were killed."""
    for path in folder.glob(f"{_PREFIX}*-*"):
        try:
            os.kill(int(path.name.removeprefix(_PREFIX).split("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except PermissionError:  # somebody else's, and alive
            continue
