"""The kernel for a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from treadle.training.attention.interface import Kernel, Shape
from treadle.training.attention.tiles import Tiles


def kernel_for(device: torch.device) -> Callable[[Shape], Kernel]:
    """What makes tree attention on this device."""
    return Tiles
