"""When going on would be pointless: reasons to stop a run, from what has finished since its last batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle.core.errors import Cause
from treadle.core.types import DropReason
from treadle.orchestration.config import RunConfig


@dataclass(slots=True)
class Since:
    """What has finished since the last batch was taken; of attempts that were made again, the last one counts."""

    trajectories: int = 0
    groups: int = 0
    failures: Counter[tuple[Cause, str]] = field(default_factory=Counter)
    discarded: Counter[DropReason] = field(default_factory=Counter)


def too_many_failed(since: Since, config: RunConfig, update: int) -> str | None:
    """The reason, or None. Before a batch's worth has finished, only if it is certain. update: that is waited for."""
    if not since.failures:
        return None
    (cause, message), count = since.failures.most_common(1)[0]
    everyone = max(since.trajectories, config.groups_per_batch * config.training.group_size)
    what, why = f"of update {update} failed", f"most often ({count}x) {cause}: {message}"
    return _beyond(since.failures.total(), everyone, config, what, why)


def too_many_refused(refused: Mapping[str, str], trajectories: int, config: RunConfig, update: int) -> str | None:
    """The reason, or None. refused: trajectory_id -> why, of the trajectories of an update."""
    if not refused:
        return None
    what, why = f"of update {update} could not be trained", f"for example {min(refused.values())}"
    return _beyond(len(refused), trajectories, config, what, why)


def too_many_discarded(since: Since, config: RunConfig, update: int) -> str | None:
    """The reason, or None. update: that is waited for."""
    most, batch = config.orchestration.max_sampled, config.groups_per_batch
    if since.groups < most * batch or since.discarded.total() <= (most - 1) * batch:  # others wait for a straggler
        return None
    reasons = ", ".join(f"{count} {reason}" for reason, count in since.discarded.most_common())
    return (
        f"{since.groups} groups were sampled for update {update}, which needs {batch}; discarded: {reasons} "
        f"(orchestration.max_sampled is {most:g} times what is needed)"
    )


def _beyond(count: int, everyone: int, config: RunConfig, what: str, why: str) -> str | None:
    most = config.orchestration.max_failed_fraction
    if count <= most * everyone:
        return None
    return f"{count} of {everyone} trajectories {what} (orchestration.max_failed_fraction is {most}); {why}"
