"""Recorded groups of every kind, and whatever may be decided about them afterwards."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from tests.worlds import make_group, make_step
from treadle.core.errors import Cause
from treadle.core.outcomes import leave_out, without_stale
from treadle.core.rewards import Reward
from treadle.core.types import DropReason, Failure, Group, Status, Step, Trajectory


@st.composite
def recorded_groups(draw: st.DrawFn) -> list[Group]:
    """As they are recorded: attempts that failed or are overlong, answers that nobody got or used, any versions."""

    def step(number: int) -> Step:
        length = draw(st.integers(0, 3))
        versions = draw(st.lists(st.integers(0, 4), min_size=length, max_size=length))
        made = replace(make_step([1] * (number + 1), [2] * length), policy_versions=np.array(versions, np.int32))
        given = Reward({"page": draw(st.sampled_from([0.0, 0.5]))})
        dropped = draw(st.sampled_from([None, None, None, DropReason.CANCELLED, DropReason.REJECTED]))
        return replace(made, given=given, shaping=draw(st.sampled_from([0.0, -0.25])), dropped=dropped)

    def trajectory(group: int, attempt: int) -> Trajectory:
        steps = tuple(step(number) for number in range(draw(st.integers(0, 4))))
        made = Trajectory(f"g{group:06d}.{attempt}", "t", attempt, steps, 1.0, Status.DONE, seconds=2.0)
        kind = draw(st.sampled_from([1.0, 0.0, None, DropReason.OVERLONG]))
        if kind is None:
            return replace(made, reward=None, status=Status.FAILED, failure=Failure(Cause.AGENT, "x"))
        return replace(made, dropped=kind) if isinstance(kind, DropReason) else replace(made, reward=kind)

    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return [make_group(g, *(trajectory(g, attempt) for attempt in range(size))) for g, size in enumerate(sizes)]


@st.composite
def decisions(draw: st.DrawFn, groups: list[Group]) -> list[Group]:
    """The same, after anything that may be decided later."""
    oldest = draw(st.integers(0, 5))
    names = [t.trajectory_id for group in groups for t in group.trajectories]
    refused = draw(st.sets(st.sampled_from(names)))
    reasons = draw(st.lists(st.none() | st.sampled_from(DropReason), min_size=len(groups), max_size=len(groups)))
    decided = [leave_out(without_stale(group, oldest), DropReason.REFUSED, refused) for group in groups]
    return [g if reason is None else leave_out(g, reason) for g, reason in zip(decided, reasons, strict=True)]
