"""How many attempts are played side by side: as many as keep the engine full."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.core.types import Trajectory

_MEMORY = 100  # trajectories after which one counts 1/e as much


@dataclass(slots=True)
class ConcurrencyController:
    """Follows how much of their time attempts spend in the engine.

    capacity: sequences that the engine decodes together. An attempt has (seconds in the engine) / (seconds it takes)
    calls there on average (Little's law), so that capacity divided by that many attempts fill it. Fewer leave it idle;
    the calls of more would wait in its queue, while their attempts' first tokens grow old. Waiting counts as being in
    the engine: if there are too many, there will be fewer.
    """

    capacity: int
    _in_engine: float = 0.0
    _seconds: float = 0.0

    def observe(self, trajectory: Trajectory) -> None:
        """Learn from a finished attempt. The longer it took, the more it counts: it is found running more often."""
        decay = 1 - 1 / _MEMORY
        self._in_engine = decay * self._in_engine + trajectory.engine_seconds
        self._seconds = decay * self._seconds + trajectory.seconds

    @property
    def engine_share(self) -> float:
        """Calls that one attempt has in the engine at a time, on average; 1 before any attempt was observed."""
        return self._in_engine / self._seconds if self._in_engine > 0 and self._seconds > 0 else 1.0

    @property
    def limit(self) -> int:
        """Number of attempts that fill the engine."""
        return math.ceil(self.capacity / self.engine_share)
