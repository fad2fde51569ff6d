"""Ctrl-C and SIGTERM: finish the update, save, leave."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class StopRequest:
    """Set by Ctrl-C or SIGTERM: the loop finishes its update, checkpoints and leaves."""

    asked: bool = False


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
        stop.asked = True
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
