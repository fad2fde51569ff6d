"""Ctrl-C: the first one asks a run to stop, a second one interrupts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INSISTING = 7.0
"""Seconds after which an interrupt that did not end the process is raised again."""


class Interrupt(KeyboardInterrupt):
    """Raised by `InterruptHandler`, which tells Ctrl-C from user code that raises KeyboardInterrupt."""


class InterruptHandler:
    """Signal handler: the first signal calls `ask`, each later one raises `Interrupt`.

    Code that swallows the exception meets it again every `INSISTING` seconds, until `close` is called.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask, self.asked = ask, False
        self._again: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal."""
        if not self.asked:
            self.asked = True
            self._ask()
            return
        self.close()
        main = threading.main_thread().ident or 0  # a blocking call there only ends if that thread gets the signal
        self._again = threading.Timer(INSISTING, signal.pthread_kill, (main, number))
        self._again.daemon = True
        self._again.start()
        raise Interrupt

    def close(self) -> None:
        """Stop raising."""
        if self._again is not None:
            self._again.cancel()


@contextmanager
def handled(ask: Callable[[], None], *numbers: int) -> Iterator[InterruptHandler]:
    """Handle these signals by one `InterruptHandler`; only the main thread can. Restores their handlers on exit."""
    handler = InterruptHandler(ask)
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield handler
    finally:
        handler.close()
        for number, previous in before.items():
            signal.signal(number, previous)
