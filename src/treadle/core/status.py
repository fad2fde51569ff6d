"""Current load of the parts of a run, for display only."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process: `ProcessId("node-3", 4711)`."""

    host: str
    pid: int

    @classmethod
    def own(cls) -> ProcessId:
        return cls(socket.gethostname(), os.getpid())


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """Load of an engine, a rank or a worker: `ComponentStatus("engine", "0", running=64, waiting=3, cache=0.8)`.

    None: unknown or not applicable.

    process: None in the run's own process. running: calls (groups, attempts) in progress. waiting: queued ones.
    sessions: open ones. cache: share of the KV cache in use. version: of the served policy. error: why it stopped; ""
    while it works.
    """

    kind: str
    name: str
    process: ProcessId | None = None
    running: int | None = None
    waiting: int | None = None
    sessions: int | None = None
    cache: float | None = None
    version: int | None = None
    error: str = ""
