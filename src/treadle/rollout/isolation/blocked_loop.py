"""Watches an event loop, and warns while user code blocks it.

A thread has the loop answer every tenth of a second. When it has not answered for a second, the thread looks at the
loop's stack, and names the attempt whose user code is running and the line.
"""

from __future__ import annotations

import asyncio
import threading
import time
from asyncio.events import Handle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from treadle.rollout.isolation.tracebacks import thread_frames, user_place
from treadle.rollout.isolation.user_code import RUNNING, UserCode

BLOCKED = 1.0
"""Seconds without an answer after which the loop counts as blocked."""
_PERIOD = 0.1  # seconds between two questions
_WARNINGS = 20  # at most


@contextmanager
def watched_event_loop(log: Callable[[str], None]) -> Iterator[None]:
    """Watch the running event loop. log: called from another thread, once for each line that blocks."""
    watch, over = _Watch(log), threading.Event()
    thread = threading.Thread(target=watch.run, args=(over,), name="treadle-loop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Watch:
    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._logged = log, set[tuple[str, str]]()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._answered, self._asked = time.monotonic(), False
        self._blocking: UserCode | None = None

    def run(self, over: threading.Event) -> None:
        while not over.wait(_PERIOD):
            if not self._asked:
                self._asked = True
                self._loop.call_soon_threadsafe(self._answer)
            elif self._blocking is None and time.monotonic() - self._answered >= BLOCKED:
                self._warn()

    def _answer(self) -> None:
        now = time.monotonic()
        if self._blocking is not None:
            self._blocking.blocked_seconds += now - self._answered
        self._answered, self._asked, self._blocking = now, False, None

    def _warn(self) -> None:
        frames, user = list[FrameType](), None
        for frame in thread_frames(self._thread):
            if frame.f_code is Handle._run.__code__:  # runs a callback of the loop: a turn of a task, in its context
                user = frame.f_locals["self"]._context.get(RUNNING)
                break
            frames.append(frame)
        place = user_place(frames)
        if user is None or not place or not self._asked:
            return
        self._blocking = user
        if (user.name, place) not in self._logged and len(self._logged) < _WARNINGS:
            self._logged.add((user.name, place))
            self._log(
                f"{user.name} blocks the event loop, at {place} ({user.attempt}): nothing else runs meanwhile. "
                "Methods that are not async run in a thread and block nothing"
            )
