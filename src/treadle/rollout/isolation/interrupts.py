"""Ctrl-C: the first one asks a run to stop, a second one interrupts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt(KeyboardInterrupt):
    """Raised by `InterruptHandler`, to tell Ctrl-C from user code that raises KeyboardInterrupt."""


class InterruptHandler:
    """Signal handler: the first signal calls `ask`, each later one raises `Interrupt`."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask, self.asked = ask, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise Interrupt
        self.asked = True
        self._ask()


@contextmanager
def handled(ask: Callable[[], None], *numbers: int) -> Iterator[InterruptHandler]:
    """Handle these signals with one `InterruptHandler`, on the main thread only. Restores their handlers on exit."""
    handler = InterruptHandler(ask)
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield handler
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
