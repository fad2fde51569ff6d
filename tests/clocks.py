"""Event loops whose time a test decides on: it reaches a limit when it says so, however slow the machine is."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from treadle.testing import VirtualLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def virtually(main: Coroutine[Any, Any, T]) -> T:
    """The result, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class StuckLoop(VirtualLoop):
    """Virtual time, which stands still while functions run in threads, but passes while they are in `stuck`."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self._here = threading.local()
        self._stuck: set[object] = set()

    def stuck(self) -> None:
        """For a function in a thread: wait until `released` is set."""
        self.call_soon_threadsafe(self._stuck.add, self._here.call)
        self.released.wait()

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run it as usual, in a thread that knows which call it makes."""
        call = object()

        def run() -> T:
            self._here.call = call
            return func(*args)

        future = super().run_in_executor(executor, run)
        future.add_done_callback(lambda _: self._stuck.discard(call))
        return future

    def advance(self, seconds: float | None) -> float | None:
        busy, self._busy = self._busy, self._busy - len(self._stuck)
        try:
            return super().advance(seconds)
        finally:
            self._busy = busy


class SkippingLoop(asyncio.SelectorEventLoop):
    """Real time, of which `skip` leaves out some: for limits on what waits for sockets and processes."""

    skipped = 0.0

    def time(self) -> float:
        """Return the real clock's seconds and those that were skipped."""
        return super().time() + self.skipped

    def skip(self, seconds: float) -> None:
        """Let time pass at once; what it ends, ends when the caller waits."""
        self.skipped += seconds
