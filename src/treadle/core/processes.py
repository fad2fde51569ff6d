"""Environment variables and memory of this process."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, for this process and for processes started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def release_freed_memory() -> None:
    """Return glibc's freed memory to the system: sampling cannot reuse fragments left by training."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def return_large_blocks_when_freed() -> None:
    """Have glibc return each block of 4 MiB or more when it is freed; no-op with other C libraries.

    By default glibc raises that limit to 32 MiB, and smaller tensors fragment the heap: 15% of a rank's memory in an
    update that gathers and frees one layer at a time.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(-3, 4 << 20)  # M_MMAP_THRESHOLD of malloc.h
