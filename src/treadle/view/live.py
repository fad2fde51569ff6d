"""What a run does at this moment, or how it ended, from its `status.json`."""

from __future__ import annotations

import time

from treadle.orchestration.reporting.live_status import RunStatus
from treadle.view.models import Now

_WARM_START = "warm start"
_STALE = 10.0  # seconds without a status after which the page says so


def now_of(status: RunStatus, state: str, pace: float | None, moment: float) -> Now:
    """Put a run's status in words. pace: seconds of an update, if known. moment: in seconds since 1970."""
    now = Now(state=state, message=status.message)
    if state != "in progress":
        now.doing = _ending(status, state)
        return now
    if moment - status.written > _STALE:
        now.doing = f"no status for {_long(moment - status.written)}, the last one during {status.phase}"
        return now
    pieces = f" {status.done} of {status.total}" if status.total > 1 else ""
    now.doing = f"{status.phase}{pieces} for {_long(moment - status.since)}"
    seconds = _left(status, pace)
    now.left = f"about {_long(seconds)} left{' of it' if status.phase == _WARM_START else ''}" if seconds else ""
    return now


def _left(status: RunStatus, pace: float | None) -> float | None:
    """Return the seconds until the end of the warm start, or of the run."""
    if status.phase == _WARM_START:
        return (status.total - status.done) * (status.written - status.since) / status.done if status.done else None
    return None if pace is None else (status.updates - status.update) * pace


def _ending(status: RunStatus, state: str) -> str:
    ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.written))
    if status.error:
        return f"ended {ended}: {status.error}"
    if state == "finished" or not status.phase:
        return f"ended {ended}"
    return f"last status {ended}, during {status.phase}"


def _long(seconds: float) -> str:
    """Return a duration for reading: `8 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
