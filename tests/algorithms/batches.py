"""Random batches with rewards of steps, penalties and values; and the same batches for the slow references."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.algorithms.slow import SlowGroup, SlowStep, SlowTrajectory
from tests.models import ragged_groups
from treadle.core.rewards import Reward
from treadle.core.types import BreakCause, Group, Step, Trajectory
from treadle.packing.breaks import calling_steps
from treadle.packing.flat import FlatBatch, flatten

STEP_REWARDS = (0.0, 0.0, 1.0, -0.5, 0.25)


@dataclass(frozen=True)
class Drawn:
    """A batch, and of each of its tokens a penalty and a value."""

    groups: list[Group]
    batch: FlatBatch
    penalty: NDArray[np.float64]
    values: NDArray[np.float64]

    def slow(self, penalised: bool) -> list[SlowGroup]:
        """Graded trajectories only, in groups that have any; states told from prompts."""
        tokens = iter(zip(self.penalty.tolist(), self.values.tolist(), strict=True))
        made = [
            [_slow(t, t.reward, tokens, penalised) for t in group.trajectories if t.reward is not None]
            for group in self.groups
        ]
        return [group for group in made if group]


def _slow(
    trajectory: Trajectory, reward: float, tokens: Iterator[tuple[float, float]], penalised: bool
) -> SlowTrajectory:
    made, total = [], reward
    for step in trajectory.steps:
        drawn = [next(tokens) for _ in step.mask]
        taken = [-p if m and penalised else 0.0 for m, (p, _) in zip(step.mask, drawn, strict=True)]
        state = hash(step.prompt_ids.tobytes())
        given = [0.0] * len(step.mask) if step.given.tokens is None else step.given.tokens.tolist()
        opens = step.break_cause is BreakCause.SUMMARY
        values = [v for _, v in drawn]
        made.append(SlowStep(step.mask.tolist(), float(step.reward), state, values, taken, given, opens))
        total += sum(taken)
    if made:
        for number, (own, caller) in enumerate(zip(made, calling_steps(trajectory.steps).tolist(), strict=True)):
            own.caller = None if caller == number else caller
        made[-1].reward += reward - sum(step.reward for step in trajectory.steps)
    return SlowTrajectory(made, total)


def with_penalties(groups: list[SlowGroup]) -> list[SlowGroup]:
    """Penalties moved from tokens to the rewards of their steps."""
    for step in (step for group in groups for t in group for step in t.steps):
        step.reward += sum(step.token_rewards)
    return groups


def _rewarded(step: Step, reward: float, draw: st.DrawFn) -> Step:
    step = replace(step, break_cause=draw(st.sampled_from((None, None, BreakCause.SUMMARY))))
    if not draw(st.booleans()):
        return replace(step, reward=reward)
    tokens = [draw(st.sampled_from(STEP_REWARDS)) for _ in step.mask]
    return replace(step, reward=reward, given=Reward(tokens=np.array(tokens, np.float32)))


@st.composite
def rewarded_batches(draw: st.DrawFn) -> Drawn:
    """Ragged groups; steps have rewards too, which need not add up to the trajectory's, and some of them tokens."""
    groups = []
    for group in draw(ragged_groups(max_groups=3, max_size=4, max_steps=5, vocabulary=2)):
        trajectories = [
            replace(t, steps=tuple(_rewarded(s, draw(st.sampled_from(STEP_REWARDS)), draw) for s in t.steps))
            for t in group.trajectories
        ]
        groups.append(replace(group, trajectories=tuple(trajectories)))
    batch = flatten(groups)
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    return Drawn(groups, batch, random.normal(0, 0.1, len(batch)), random.normal(size=len(batch)))
