"""`Worker`: a process that answers calls, over any carrier."""

from __future__ import annotations

from typing import Any, Protocol

from treadle.core.engine import ProcessId


class Worker(Protocol):
    """A process that answers calls."""

    @property
    def process(self) -> ProcessId | None:
        """The process; None until `open` has returned."""

    async def open(self) -> None:
        """Start it and wait until it runs. Raises WorkerLost."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the answer; cancelling this cancels the call.

        Reraises Treadle's errors; raises PlacementError for any other exception there, and WorkerLost.
        """

    def post(self, method: str, *arguments: Any) -> None:
        """Call a method without waiting for its answer."""

    def kill(self) -> None:
        """End it immediately, from any thread; its calls fail. Idempotent."""

    async def close(self) -> None:
        """Kill it, and wait for its end. Idempotent."""

    def tail(self) -> str:
        """Return the end of its output, or where to find it, as the end of an error."""
