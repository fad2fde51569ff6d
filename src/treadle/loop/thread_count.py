"""Torch's thread count, and how its threads wait for each other. Loads no torch.

OpenMP reads `OMP_WAIT_POLICY` once, when torch is loaded. Spinning threads waste cores on a machine with any other
load.

"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from treadle.core.errors import ConfigError

SMALL = 10_000_000
"""Parameters below which a model is small: its operations are too short to be shared among threads."""


def wait_passively() -> bool:
    """Let OpenMP threads sleep while they wait, unless environment variables configure it.

    Returns False if that is too late: torch is already loaded, and its threads spin.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return True
    # Child processes inherit it in any case.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    return "torch" not in sys.modules


def available_cores() -> int:
    """Return the number of cores this process may use, possibly fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads(parameters: int, cores: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the threads for a model of this many parameters: `OMP_NUM_THREADS` if set, otherwise by a fixed rule.

    The rule: all cores, but one thread for a `SMALL` model. On two cores, a second thread that waits passively makes a
    step 1.5 times as fast at 14 million parameters, 1.3 times at 148 million, and no faster at the demo's 0.4 million.

    Raises ConfigError if `OMP_NUM_THREADS` is not a number.

    """
    # a list has one entry per level of nesting
    if configured := environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip():
        if not configured.isdecimal() or int(configured) < 1:
            raise ConfigError(f"OMP_NUM_THREADS is {configured!r}; give the number of threads, or unset it")
        return int(configured)
    return 1 if parameters < SMALL else cores
