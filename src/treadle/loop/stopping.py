"""Reasons to end a run before its last update: a request (Ctrl-C, SIGTERM, a callback), or a limit of `failures`."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from treadle.core.errors import TrainingStopped
from treadle.core.stop import StopRequest
from treadle.core.types import DropReason, Failure, Group
from treadle.loop.config import LoopPlan
from treadle.rollout.isolation.interrupts import handled


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[None]:
    """Request a stop at the first Ctrl-C or SIGTERM, interrupt at the second; restore the handlers on leaving.

    They are plain handlers rather than the event loop's, which would wait for an update to end.
    """

    def ask() -> None:
        stop.request()
        # A signal may arrive in the middle of a print, which must not be reentered.
        os.write(2, b"\nstopping: finishing this update, then saving a checkpoint (once more: stop at once)\n")

    with handled(ask, signal.SIGINT, signal.SIGTERM):
        yield


class StopConditionMet(TrainingStopped):
    """Raised when a limit is exceeded. The trainer's weights are consistent: a checkpoint can still be made."""


@dataclass(slots=True)
class WindowStats:
    """Attempts finished since the last batch was taken; of an attempt and its retries, only the last one."""

    trajectories: int = 0
    groups: int = 0
    failures: Counter[Failure] = field(default_factory=Counter)
    # trajectories with malformed requests, by their warnings
    bad_requests: Counter[str] = field(default_factory=Counter)
    discarded: Counter[DropReason] = field(default_factory=Counter)


def check_failure_rate(window: WindowStats, plan: LoopPlan, update: int) -> None:
    """Raise StopConditionMet if too many trajectories failed, or sent malformed requests.

    Raised before a batch's worth has finished if it is certain by then. update: the one being waited for.
    """
    everyone = max(window.trajectories, plan.groups_per_batch * plan.group_size)
    _check_failures(window, everyone, plan, f"of update {update} failed")
    for warning, _ in window.bad_requests.most_common(1):
        what, why = f"of update {update} sent malformed requests", f"for example: {warning}"
        _check_share(window.bad_requests.total(), everyone, plan, what, why)


def check_evaluation(groups: Sequence[Group], plan: LoopPlan) -> None:
    """Raise StopConditionMet if all attempts at held-out tasks failed, unless failures should never end the run."""
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    window = WindowStats(failures=Counter(t.failure for t in everyone if t.failure is not None))
    if window.failures.total() == len(everyone):
        _check_failures(window, len(everyone), plan, "at held-out tasks failed")


def check_refusal_rate(refused: Mapping[str, str], plan: LoopPlan, update: int) -> None:
    """Raise StopConditionMet if the trainer refused too many. refused: trajectory_id -> reason, for a batch."""
    if refused:
        trajectories = plan.groups_per_batch * plan.group_size  # independent of retries
        what, why = f"of update {update} could not be trained", f"for example {min(refused.values())}"
        _check_share(len(refused), trajectories, plan, what, why)


def check_discard_rate(window: WindowStats, plan: LoopPlan, update: int) -> None:
    """Raise StopConditionMet if too many sampled groups were discarded. update: the one being waited for."""
    limit, batch = plan.failures.max_sampled, plan.groups_per_batch
    # the others wait for a straggler
    if window.groups < limit * batch or window.discarded.total() <= (limit - 1) * batch:
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in window.discarded.most_common())
    raise StopConditionMet(
        f"{window.groups} groups were sampled for update {update}, which needs {batch}; discarded: {reasons} "
        f"(failures.max_sampled is {limit:g} times the required number)"
    )


def _check_failures(window: WindowStats, everyone: int, plan: LoopPlan, what: str) -> None:
    for failure, count in window.failures.most_common(1):
        place = f" ({failure.place})" if failure.place else ""
        why = f"most often ({count}x) {failure.cause}: {failure.message}{place}"
        _check_share(window.failures.total(), everyone, plan, what, why)


def _check_share(count: int, everyone: int, plan: LoopPlan, what: str, why: str) -> None:
    limit = plan.failures.max_failed_fraction
    if count > limit * everyone:
        raise StopConditionMet(
            f"{count} of {everyone} trajectories {what} (failures.max_failed_fraction is {limit}); {why}"
        )
