"""A request to end a run before its last update."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from treadle.core.errors import TrainingStopped

T = TypeVar("T")


class StopRequest:
    """Asks the loop to finish its update, save a checkpoint and stop: on Ctrl-C, SIGTERM, or after a failure."""

    def __init__(self) -> None:
        self.requested = False
        self._reason: tuple[str, BaseException | None] | None = None
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def request(self, reason: str = "", error: BaseException | None = None) -> None:
        """Request a stop, even from a signal handler or another thread. reason, error: the failure, if any."""
        self.requested = True
        if reason and self._reason is None:
            self._reason = reason, error
        if self._waiting is not None:
            loop, event = self._waiting
            loop.call_soon_threadsafe(event.set)

    def raise_reason(self, update: int) -> None:
        """Raise TrainingStopped if a failure caused the request; the run was then saved at this update."""
        if self._reason is not None:
            raise stopped(self._reason[0], update) from self._reason[1]

    async def unless_requested(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of the work; if a stop is requested before it is done, cancel it and return None."""
        event = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), event
        if self.requested:
            event.set()
        tasks = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            self._waiting = None
            for task in tasks:
                task.cancel()


def stopped(reason: object, update: int) -> TrainingStopped:
    what = str(reason).removesuffix(".")
    return TrainingStopped(
        f"{what}. A checkpoint of update {update} is saved: fix the cause, then --resume (from Python: resume=True)"
    )
