"""Ctrl-C and SIGTERM: finish the update, save, leave."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class StopRequest:
    """Set by Ctrl-C or SIGTERM: the loop finishes its update, checkpoints and leaves."""

    def __init__(self) -> None:
        self.asked = False
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def ask(self) -> None:
        """Ask, also from a signal handler or another thread."""
        self.asked = True
        if self._waiting is not None:
            loop, event = self._waiting
            loop.call_soon_threadsafe(event.set)

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of the work; None, and the work is cancelled, if a stop is asked for before it is done."""
        event = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), event
        if self.asked:
            event.set()
        tasks = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            self._waiting = None
            for task in tasks:
                task.cancel()


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the loop to finish its update and save; the second one interrupts at once.

    Plain handlers rather than the event loop's, which would wait for an update to end. They are put back afterwards.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are not ours
        yield
        return
    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in handled}

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.ask()
        for number in handled:
            signal.signal(number, signal.default_int_handler)
        # a signal may come in the middle of a print, which must not be entered again
        os.write(2, b"\nstopping: finishing this update, then saving a checkpoint (once more: stop at once)\n")

    try:
        for number in handled:
            signal.signal(number, ask)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
