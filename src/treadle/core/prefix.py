"""The longest common prefix of two id sequences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return how many leading ids of a and b agree; or leading rows, if they are [L, width]."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    places = np.flatnonzero(different if different.ndim == 1 else different.any(1))
    return int(places[0]) if len(places) else size
