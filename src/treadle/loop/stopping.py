"""Why a run ends before its last update: a request (Ctrl-C, SIGTERM, a callback), or a limit of `failures`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from treadle.core.errors import TrainingStopped
from treadle.core.types import DropReason, Failure, Group
from treadle.plan.config import RunConfig
from treadle.rollout.isolation.event_loop import handled

T = TypeVar("T")


class StopRequest:
    """Asks the loop to finish its update, save a checkpoint and leave: on Ctrl-C, SIGTERM, or when something fails."""

    def __init__(self) -> None:
        self.requested = False
        self._reason: tuple[str, BaseException | None] | None = None
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def request(self, reason: str = "", error: BaseException | None = None) -> None:
        """Request a stop, also from a signal handler or another thread. reason, error: what went wrong, if anything."""
        self.requested = True
        if reason and self._reason is None:
            self._reason = reason, error
        if self._waiting is not None:
            loop, event = self._waiting
            loop.call_soon_threadsafe(event.set)

    def raise_reason(self, update: int) -> None:
        """Raise TrainingStopped if something went wrong: the run was asked to stop then, and saved at this update."""
        if self._reason is not None:
            raise stopped(self._reason[0], update) from self._reason[1]

    async def unless_requested(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of the work; if a stop is requested before it is done, cancel it and return None."""
        event = asyncio.Event()
        self._waiting = asyncio.get_running_loop(), event
        if self.requested:
            event.set()
        tasks = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            self._waiting = None
            for task in tasks:
                task.cancel()


def stopped(reason: object, update: int) -> TrainingStopped:
    what = str(reason).removesuffix(".")
    return TrainingStopped(
        f"{what}. A checkpoint of update {update} is saved: fix the cause, then --resume (from Python: resume=True)"
    )


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Request a stop at the first Ctrl-C or SIGTERM, interrupt at once at the second; on leaving, restore the handlers.

    They are plain handlers rather than the event loop's, which would wait for an update to end.
    """

    def ask() -> None:
        stop.request()
        # a signal may come in the middle of a print, which must not be entered again
        os.write(2, b"\nstopping: finishing this update, then saving a checkpoint (once more: stop at once)\n")

    with handled(ask, signal.SIGINT, signal.SIGTERM):
        yield


class StopConditionMet(TrainingStopped):
    """A limit is exceeded. The trainer's weights are whole: a checkpoint can be made before the run ends."""


@dataclass(slots=True)
class WindowStats:
    """What has finished since the last batch was taken; of an attempt and its retries, the last one."""

    trajectories: int = 0
    groups: int = 0
    failures: Counter[Failure] = field(default_factory=Counter)
    bad_requests: Counter[str] = field(default_factory=Counter)  # trajectories with some, by their warnings
    discarded: Counter[DropReason] = field(default_factory=Counter)


def check_failure_rate(window: WindowStats, config: RunConfig, update: int) -> None:
    """Raise StopConditionMet if too many trajectories failed, or sent malformed requests.

    That may be before a batch's worth has finished, if it is certain by then. update: the one that is waited for.
    """
    everyone = max(window.trajectories, config.groups_per_batch * config.training.group_size)
    _check_failures(window, everyone, config, f"of update {update} failed")
    for warning, _ in window.bad_requests.most_common(1):
        what, why = f"of update {update} sent malformed requests", f"for example: {warning}"
        _check_share(window.bad_requests.total(), everyone, config, what, why)


def check_evaluation(groups: Sequence[Group], config: RunConfig) -> None:
    """Raise StopConditionMet if all attempts at held-out tasks failed, unless failures are never to end the run."""
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    window = WindowStats(failures=Counter(t.failure for t in everyone if t.failure is not None))
    if window.failures.total() == len(everyone):
        _check_failures(window, len(everyone), config, "at held-out tasks failed")


def check_refusal_rate(refused: Mapping[str, str], config: RunConfig, update: int) -> None:
    """Raise StopConditionMet if the trainer could not train too many. refused: trajectory_id -> why, of a batch."""
    if refused:
        trajectories = config.groups_per_batch * config.training.group_size  # whatever was retried before
        what, why = f"of update {update} could not be trained", f"for example {min(refused.values())}"
        _check_share(len(refused), trajectories, config, what, why)


def check_discard_rate(window: WindowStats, config: RunConfig, update: int) -> None:
    """Raise StopConditionMet if too many groups were sampled in vain. update: that is waited for."""
    limit, batch = config.failures.max_sampled, config.groups_per_batch
    if window.groups < limit * batch or window.discarded.total() <= (limit - 1) * batch:  # others wait for a straggler
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in window.discarded.most_common())
    raise StopConditionMet(
        f"{window.groups} groups were sampled for update {update}, which needs {batch}; discarded: {reasons} "
        f"(failures.max_sampled is {limit:g} times what is needed)"
    )


def _check_failures(window: WindowStats, everyone: int, config: RunConfig, what: str) -> None:
    for failure, count in window.failures.most_common(1):
        place = f" ({failure.place})" if failure.place else ""
        why = f"most often ({count}x) {failure.cause}: {failure.message}{place}"
        _check_share(window.failures.total(), everyone, config, what, why)


def _check_share(count: int, everyone: int, config: RunConfig, what: str, why: str) -> None:
    limit = config.failures.max_failed_fraction
    if count > limit * everyone:
        raise StopConditionMet(
            f"{count} of {everyone} trajectories {what} (failures.max_failed_fraction is {limit}); {why}"
        )
