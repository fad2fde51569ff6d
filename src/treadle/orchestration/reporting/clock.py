"""Wall and CPU time of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """Measures wall and CPU seconds of a run. wall_before, cpu_before: those of the run's earlier processes."""

    wall_before: float = 0.0
    cpu_before: float = 0.0
    _wall: float = field(default_factory=time.perf_counter)
    _cpu: float = field(default_factory=time.process_time)

    def read(self) -> tuple[float, float]:
        """Return (wall, cpu) seconds so far."""
        return (
            self.wall_before + time.perf_counter() - self._wall,
            self.cpu_before + time.process_time() - self._cpu,
        )
