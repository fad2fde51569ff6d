"""When going on would be pointless: limits on what fails, is refused or discarded (the section `failures`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle.core.errors import Cause, TrainingStopped
from treadle.core.types import DropReason
from treadle.orchestration.config import RunConfig


class StopConditionMet(TrainingStopped):
    """A limit is exceeded. The trainer's weights are whole: a checkpoint can be made before the run ends."""


@dataclass(slots=True)
class WindowStats:
    """What has finished since the last batch was taken; of an attempt and its retries, the last one."""

    trajectories: int = 0
    groups: int = 0
    failures: Counter[tuple[Cause, str]] = field(default_factory=Counter)
    bad_requests: Counter[str] = field(default_factory=Counter)  # trajectories with some, by their warnings
    discarded: Counter[DropReason] = field(default_factory=Counter)


def check_failure_rate(window: WindowStats, config: RunConfig, update: int) -> None:
    """Raise StopConditionMet if too many trajectories failed, or sent malformed requests.

    That may be before a batch's worth has finished, if it is certain by then.

    update: the one that is waited for.
    """
    everyone = max(window.trajectories, config.groups_per_batch * config.training.group_size)
    for (cause, message), count in window.failures.most_common(1):
        what, why = f"of update {update} failed", f"most often ({count}x) {cause}: {message}"
        _check_share(window.failures.total(), everyone, config, what, why)
    for warning, _ in window.bad_requests.most_common(1):
        what, why = f"of update {update} sent malformed requests", f"for example: {warning}"
        _check_share(window.bad_requests.total(), everyone, config, what, why)


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


def _check_share(count: int, everyone: int, config: RunConfig, what: str, why: str) -> None:
    limit = config.failures.max_failed_fraction
    if count > limit * everyone:
        raise StopConditionMet(
            f"{count} of {everyone} trajectories {what} (failures.max_failed_fraction is {limit}); {why}"
        )
