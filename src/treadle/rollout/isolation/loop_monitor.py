"""Which user code holds the event loop, and for how long.

begin -> user code runs on the loop -> end
   └── meanwhile a thread watches: after a second it reports whose code it is, and at which line
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from treadle.rollout.isolation.tracebacks import user_place

BLOCKED = 1.0
"""Seconds after which a turn on the event loop counts as blocking it."""

_PERIOD = 0.25  # seconds between two looks
_MOST = 20  # lines reported in all


@dataclass(slots=True)
class Turn:
    """Describes user code that runs on the event loop now: whose, for which attempt, since when, on which thread."""

    name: str
    attempt: str
    since: float
    thread: int
    reported: bool = False


class LoopMonitor:
    """Times every turn of user code on one event loop.

    blocked_seconds: of all turns of `BLOCKED` seconds and more. log: called once for each line that blocks, from
    another thread while it does (`watching`); otherwise afterwards. clock: gives seconds.
    """

    def __init__(
        self, log: Callable[[str], None] = lambda line: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.blocked_seconds = 0.0
        self._log, self._clock = log, clock
        self._turn: Turn | None = None
        self._said: set[tuple[str, str]] = set()

    def begin(self, name: str, attempt: str) -> Turn | None:
        """Start timing user code; return the turn that it is nested in, to be passed to `end`."""
        outer, self._turn = self._turn, Turn(name, attempt, self._clock(), threading.get_ident())
        return outer

    def end(self, outer: Turn | None) -> float:
        """Stop timing it; return how many seconds it took."""
        turn, self._turn = self._turn, outer
        assert turn is not None
        seconds = self._clock() - turn.since
        if seconds >= BLOCKED and outer is None:
            self.blocked_seconds += seconds
            self._report(turn, "")
        return seconds

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch from a thread while the context lasts, and report code that blocks as it does."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="treadle-loop-monitor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_PERIOD):
            turn = self._turn
            if turn is not None and self._clock() - turn.since >= BLOCKED:
                place = user_place(sys._current_frames().get(turn.thread))
                if turn is self._turn:  # still, so that the place is its own
                    self._report(turn, place)

    def _report(self, turn: Turn, place: str) -> None:
        if turn.reported:
            return
        turn.reported = True
        if (turn.name, place) in self._said or len(self._said) >= _MOST:
            return
        self._said.add((turn.name, place))
        where = f", at {place}" if place else ""
        self._log(
            f"{turn.name} blocks the event loop{where} ({turn.attempt}): nothing else goes on meanwhile. "
            "Methods that are not async run in a thread and block nobody"
        )
