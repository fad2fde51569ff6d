"""Ctrl-C: the first one asks, each later one ends. `handled` alone handles the signal.

                   first Ctrl-C                          each later one
never_swallowed    raised, however an import handles it  the same
run                cancels `main`                        `Interrupter`: stops the loop
stop_on_signals    requests a stop after this update     that of the `run` around it
"""

from __future__ import annotations

import _thread
import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import FrameType

_TO_REACT = 0.5  # seconds for a loop to react to a second Ctrl-C, and between checks


class Interrupt(KeyboardInterrupt):
    """Raised for a second Ctrl-C, to distinguish it from KeyboardInterrupt raised by user code."""


class Interrupter:
    """Ends `run` by stopping its loop, so that no code can swallow it and none is interrupted at an arbitrary point.

    While the loop does not react, `Interrupt` is raised repeatedly in the main thread, where a library may swallow it.
    is_asked: `main` was asked to stop. interrupts: `run` should end immediately. over: set once it has ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_asked = self.interrupts = self._is_blocked = False
        self.over = threading.Event()
        self._loop = loop

    def interrupt(self) -> None:
        """Called by a signal handler, which may interrupt any code, so it must take no lock."""
        if self._is_blocked:
            self._is_blocked = False
            raise Interrupt
        if not self.interrupts:
            self.interrupts = True
            # threading.Thread.start takes a lock.
            _thread.start_new_thread(self._insist, ())
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _insist(self) -> None:
        while not self.over.wait(_TO_REACT):
            answered = threading.Event()
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(answered.set)
            if not answered.wait(_TO_REACT) and not self.over.is_set():
                self._is_blocked = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


INTERRUPTER: ContextVar[Interrupter | None] = ContextVar("treadle_interrupter", default=None)
"""Interrupter of the current `run`."""


@contextmanager
def handled(ask: Callable[[], None], *numbers: int, again: Callable[[], None] | None = None) -> Iterator[list[int]]:
    """Handle these signals inside the context, on the main thread only; yield a list that receives the first one.

    The first signal calls `ask`, each later one `again`; default: interrupt the enclosing `run`, if any. Signals that
    arrive during C code are counted, although Python sees them only once.
    """
    asked: list[int] = []
    interrupter = INTERRUPTER.get()
    act_again = again or (_raise_interrupt if interrupter is None else interrupter.interrupt)
    if not numbers or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    arrivals, wakeup = socket.socketpair()

    def handle(number: int, frame: FrameType | None) -> None:
        for _ in range(max(1, _read(arrivals).count(number))):
            if asked:
                act_again()
            else:
                asked.append(number)
                if interrupter is not None:
                    interrupter.is_asked = True
                ask()

    with arrivals, wakeup:
        arrivals.setblocking(False)
        wakeup.setblocking(False)
        fd_before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield asked
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)
            signal.set_wakeup_fd(fd_before)


def _read(arrivals: socket.socket) -> bytes:
    try:
        return arrivals.recv(4096)
    except BlockingIOError:
        return b""


@contextmanager
def never_swallowed() -> Iterator[None]:
    """Raise a Ctrl-C inside this context in any case: libraries being imported may swallow or replace it."""
    with handled(_interrupt, signal.SIGINT) as interrupted:
        try:
            yield
        except Exception:
            if not interrupted:
                raise
        if interrupted:
            raise KeyboardInterrupt


def _interrupt() -> None:
    raise KeyboardInterrupt


def _raise_interrupt() -> None:
    raise Interrupt
