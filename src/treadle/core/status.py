"""What the parts of a run do at a moment: for people who watch it, nothing depends on it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Names a process: `ProcessId("node-3", 4711)`."""

    host: str
    pid: int

    @classmethod
    def own(cls) -> ProcessId:
        """Return that of this process."""
        return cls(socket.gethostname(), os.getpid())


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """Says what an engine, a rank or a worker does: `ComponentStatus("engine", "0", running=64, waiting=3, cache=0.8)`.

    What is None is not known, or there is no such thing.

    process: its own; None in the run's process. running: calls (groups, attempts) that it works on. waiting: that have
    come and are not begun. sessions: open ones. cache: share of its KV cache that holds tokens. version: of the policy
    that it serves. error: why it does nothing any more; "" if it does.
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
