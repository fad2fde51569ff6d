"""Giving memory back to the operating system."""

from __future__ import annotations

import ctypes
import sys

_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE = 4 << 20


def release_freed_memory() -> None:
    """Return to the operating system what was freed and the C library keeps; does something with glibc alone.

    Between phases that need gigabytes each, sampling and training, what one leaves in pieces is of no use to the other,
    and their sizes would add up.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def return_large_blocks_when_freed() -> None:
    """Have the C library give each block of 4 MiB and more back when it is freed; does something with glibc alone.

    It otherwise raises that limit to 32 MiB by what it sees, and tensors below lie in a heap with holes between them:
    15% of what a rank holds in an update that gathers and frees one layer after the other.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
