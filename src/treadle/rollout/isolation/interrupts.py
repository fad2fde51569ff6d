"""Ctrl-C, told apart from user code that raises KeyboardInterrupt itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

INSISTING = 7.0
"""Seconds after which a Ctrl-C that did not end the process is raised again."""
_MOMENT = 0.01
_UNINTERRUPTED: set[CodeType] = set()


class Interrupt(KeyboardInterrupt):
    """Says that Ctrl-C was pressed: `InterruptHandler` raises it, user code does not."""


class InterruptHandler:
    """Handles signals: the first one calls `ask`, each later one raises `Interrupt`.

    Where C code calls Python (SQLite its functions), an exception would be taken for an error of the callee's, or be
    lost: within what is `uninterrupted`, it is raised a moment later. Where it is lost all the same, it is raised once
    more after `INSISTING` seconds, unless `close` comes before.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask, self.asked = ask, False
        self._again: threading.Timer | None = None
        self._insisted = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle one signal."""
        if not self.asked:
            self.asked = True
            self._ask()
            return
        if _is_uninterrupted(frame):
            self._raise_later(number, _MOMENT)
            return
        if not self._insisted:
            self._insisted = True
            self._raise_later(number, INSISTING)
        raise Interrupt

    def close(self) -> None:
        """Raise nothing any more."""
        if self._again is not None:
            self._again.cancel()

    def _raise_later(self, number: int, seconds: float) -> None:
        self.close()
        main = threading.main_thread().ident or 0  # which may be blocked: the signal must reach it
        self._again = threading.Timer(seconds, signal.pthread_kill, (main, number))
        self._again.daemon = True
        self._again.start()


def uninterrupted(function: F) -> F:
    """Mark a function that C code calls: no `Interrupt` is raised within it."""
    _UNINTERRUPTED.add(function.__code__)
    return function


def _is_uninterrupted(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code not in _UNINTERRUPTED:
        frame = frame.f_back
    return frame is not None


def is_interrupt(error: BaseException) -> bool:
    """Return whether the error is a Ctrl-C, which must propagate, and not a KeyboardInterrupt raised by user code.

    Only the main thread is ever interrupted. Under a handler of another kind the two cannot be told apart there: it
    counts as a Ctrl-C then.
    """
    if isinstance(error, Interrupt) or not isinstance(error, KeyboardInterrupt):
        return isinstance(error, Interrupt)
    on_main_thread = threading.current_thread() is threading.main_thread()
    return on_main_thread and not isinstance(signal.getsignal(signal.SIGINT), InterruptHandler)
