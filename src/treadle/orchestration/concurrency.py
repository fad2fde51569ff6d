"""How many attempts are played side by side: as many as keep the engine full."""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.core.types import Trajectory

_MEMORY = 100  # trajectories after which one counts 1/e as much


@dataclass(slots=True)
class Concurrency:
    """Follows how much of their time attempts spend in the engine.

    capacity: sequences that the engine decodes together. An attempt has (seconds in the engine) / (seconds it takes)
    calls there on average (Little's law), so that capacity divided by that many attempts fill it. Fewer leave it idle;
    the calls of more would wait in its queue, while their attempts' first tokens grow old. Waiting counts as being in
    the engine: if there are too many, there will be fewer.
    """

    capacity: int
    _in_engine: float = 0.0
    _seconds: float = 0.0

    def note(self, trajectory: Trajectory) -> None:
        """It has finished. The longer it took, the more it counts: the more often it is found running."""
        kept = 1 - 1 / _MEMORY
        self._in_engine = kept * self._in_engine + trajectory.engine_seconds
        self._seconds = kept * self._seconds + trajectory.seconds

    @property
    def calls(self) -> float:
        """In the engine at a time, of one attempt; 1 as long as nothing is known."""
        return self._in_engine / self._seconds if self._in_engine > 0 and self._seconds > 0 else 1.0

    @property
    def attempts(self) -> int:
        """That fill the engine."""
        return math.ceil(self.capacity / self.calls)
