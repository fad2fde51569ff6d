"""Giving memory back to the operating system."""

from __future__ import annotations

import ctypes
import sys


def release_freed_memory() -> None:
    """Return to the operating system what was freed and the C library keeps; does something with glibc alone.

    Between phases that need gigabytes each, sampling and training, what one leaves in pieces is of no use to the other,
    and their sizes would add up.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
