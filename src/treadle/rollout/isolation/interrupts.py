"""Ctrl-C, told apart from user code that raises KeyboardInterrupt itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Interrupt(KeyboardInterrupt):
    """Says that Ctrl-C was pressed: `InterruptHandler` raises it, user code does not."""


class InterruptHandler:
    """Handles signals: the first one calls `ask`, each later one raises `Interrupt`."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask, self.asked = ask, False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        """Handle one signal."""
        if self.asked:
            raise Interrupt
        self.asked = True
        self._ask()


def is_interrupt(error: BaseException) -> bool:
    """Return whether the error is a Ctrl-C, which must propagate, and not a KeyboardInterrupt raised by user code.

    Only the main thread is ever interrupted. Under a handler of another kind the two cannot be told apart there: it
    counts as a Ctrl-C then.
    """
    if isinstance(error, Interrupt) or not isinstance(error, KeyboardInterrupt):
        return isinstance(error, Interrupt)
    on_main_thread = threading.current_thread() is threading.main_thread()
    return on_main_thread and not isinstance(signal.getsignal(signal.SIGINT), InterruptHandler)
