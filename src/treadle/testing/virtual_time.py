"""An event loop with a jumping clock: waits of hours end immediately, and in the same order every time."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs in virtual time, which starts at 0 and jumps to the next timer when nothing else is left to do.

    Invariant: time stands still while a function runs in one of its executors (`asyncio.to_thread` included): computing
    takes no time.

    For coroutines that wait for each other, for timers and for threads; not for sockets or processes, which live in
    real time. Use with asyncio.Runner(loop_factory=VirtualLoop). Raises RuntimeError on a deadlock.
    """

    def __init__(self) -> None:
        self._now, self._busy = 0.0, 0  # busy: functions in executors
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run it as usual; time stands still until it has finished."""
        future = super().run_in_executor(executor, func, *args)
        self._busy += 1
        future.add_done_callback(self._done)
        return future

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        """Shut down as usual; the limit in seconds is never reached."""
        self._busy += 1
        try:
            await super().shutdown_default_executor(*arguments)
        finally:
            self._busy -= 1

    def advance(self, seconds: float | None) -> float | None:
        """Jump `seconds`, to the next timer, unless a thread is busy; return the selector's real waiting time.

        None: no timer, so the selector may wait indefinitely. Raises RuntimeError on a deadlock.
        """
        if self._busy:
            return None
        if seconds is None:
            raise RuntimeError(f"at {self._now:g} virtual seconds every coroutine waits, and no timer is set")
        self._now = max(self._now + seconds, math.nextafter(self._now, math.inf))
        return 0.0

    def _done(self, _: object) -> None:
        self._busy -= 1


class _Jumping(selectors.DefaultSelector):
    """Jumps when the loop would wait."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return events ready now; otherwise after the jump, or after a real wait for a thread."""
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        return super().select(self._loop.advance(timeout))
