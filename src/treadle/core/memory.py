"""Giving memory back to the operating system."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE = 4 << 20


def release_freed_memory() -> None:
    """Return freed memory that glibc keeps to the operating system; no-op with other C libraries.

    Sampling and training need gigabytes each, and cannot reuse the fragments that the other leaves.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def return_large_blocks_when_freed() -> None:
    """Have glibc return each block of 4 MiB and more when it is freed; no-op with other C libraries.

    glibc otherwise raises that limit to 32 MiB, and smaller tensors fragment the heap: 15% of a rank's memory in an
    update that gathers and frees one layer after the other.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
