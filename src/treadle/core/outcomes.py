"""Outcomes of recorded steps. Other layers record facts; the conclusions are drawn here and read everywhere else.

    fact                        recorded by                           reasons
    Step.dropped                sessions                              cancelled, rejected, replayed
                                `without_summaries`, in training      masked
                                `without_stale`, before training      stale
    Trajectory.status           the attempt's driver                  failed
    Trajectory.dropped          shaping                               overlong
                                `leave_out`, of rejected groups       failed, filtered, refused, stale, overlong
                                `Starts.whole`, of a group            diverged
    rows of the ledger          resuming or finishing a run           resampled, rolled back, damaged, unused

Each trajectory has two views:

    played    steps used by the episode, and the reward as given. Excludes `cancelled` steps, whose answers reached no
              agent, and `rejected` ones, whose answers it discarded. Includes `replayed` ones, whose tokens another
              attempt sampled. Later decisions never change this view.
    trained   steps in the loss, and the reward in the group's baseline: with shaping, and None for an attempt that is
              left out whole. A step that is dropped alone (`stale`, `masked`) still contributes its reward to the sum.

For example, two steps, the first of which became stale while the second was sampled, shaped by -0.25:

    as_played(t).steps == t.steps         as_played(t).reward == 1.0
    as_trained(t).steps == t.steps[1:]    as_trained(t).reward == 0.75
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from treadle.core.rewards import PLAIN
from treadle.core.types import (
    DropReason,
    Group,
    Ids,
    Status,
    Step,
    StepState,
    StopReason,
    Trajectory,
    common_prefix,
    seen_ids,
)

NOT_PLAYED = frozenset({DropReason.CANCELLED, DropReason.REJECTED})
"""Reasons of steps that the episode did not use. Steps dropped for any other reason were played."""


def given(reward: float | None, components: Mapping[str, float], component: str | None) -> float | None:
    """Return the value of `component` in a reward with these components (`TrajectoryView.given`)."""
    if reward is None or component is None or not components.keys() - {PLAIN}:
        return reward
    return components.get(component, 0.0)


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """Some steps of a trajectory, in call order, with the matching reward; None without one."""

    steps: tuple[Step, ...]
    reward: float | None

    @property
    def sampled(self) -> tuple[Step, ...]:
        """Return the steps without replayed ones, which another attempt sampled."""
        return tuple(step for step in self.steps if step.dropped is not DropReason.REPLAYED)

    @property
    def components(self) -> dict[str, float]:
        """Return the sum over steps of each component, before weights; empty without a reward."""
        steps = [] if self.reward is None else [step.given.by_name for step in self.steps]
        return {name: math.fsum(s.get(name, 0.0) for s in steps) for name in dict.fromkeys(n for s in steps for n in s)}

    def given(self, component: str | None = None) -> float | None:
        """Return the sum over all steps of one component, before weights; None without a reward.

        Without a name, or if only plain numbers were given (which belong to no component), returns the whole reward.
        """
        return given(self.reward, self.components, component)

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens sent: a prefix shared by three steps counts three times."""
        return sum(step.prompt_tokens for step in self.sampled)

    @property
    def completion_tokens(self) -> int:
        return sum(step.completion_tokens for step in self.sampled)

    @property
    def oldest_version(self) -> int | None:
        """Return the oldest policy version that sampled any of these tokens; None without tokens."""
        return min((int(versions.min()) for versions in self._versions()), default=None)

    @property
    def newest_version(self) -> int | None:
        return max((int(versions.max()) for versions in self._versions()), default=None)

    def _versions(self) -> Iterator[Ids]:
        return (step.policy_versions for step in self.sampled if len(step.policy_versions))


def as_played(trajectory: Trajectory) -> TrajectoryView:
    """Return the played view: the steps used by the episode and the reward as given, trained or not."""
    return TrajectoryView(tuple(step for step in trajectory.steps if was_played(step)), trajectory.reward)


def as_trained(trajectory: Trajectory) -> TrajectoryView:
    """Return the trained view as decided so far: steps in the loss, and the reward in the baseline."""
    if trajectory.reward is None or attempt_drop_reason(trajectory) is not None:
        return TrajectoryView((), None)
    steps = tuple(step for step in trajectory.steps if step.dropped is None)
    return TrajectoryView(steps, trajectory.reward + math.fsum(step.shaping for step in trajectory.steps))


def played_rewards(trajectory: Trajectory) -> list[float]:
    """Return the rewards of the played steps with shaping; what they lack of the trained sum is added to the last."""
    rewards = [step.reward + step.shaping for step in as_played(trajectory).steps]
    whole = as_trained(trajectory).reward
    if rewards and whole is not None:
        rewards[-1] += whole - math.fsum(rewards)
    return rewards


def was_played(step: Step) -> bool:
    """Return whether the episode used the step."""
    return step.dropped not in NOT_PLAYED


def rejection(step: Step) -> str:
    """Return why the answer of a rejected step was discarded, as far as recorded; "" for any other step."""
    if step.dropped is not DropReason.REJECTED:
        return ""
    if not step.summary:
        return "its answer was not used"
    return "the summary is empty" if step.stop_reason is StopReason.STOP else "the summary is cut off"


def attempt_drop_reason(trajectory: Trajectory) -> DropReason | None:
    """Return why the trajectory trains nothing at all, or None if no reason is known."""
    return DropReason.FAILED if trajectory.status is Status.FAILED else trajectory.dropped


def step_drop_reason(trajectory: Trajectory, step: Step) -> DropReason | None:
    """Return why this step of the trajectory is not trained, or None if no reason is known.

    The step's own reason takes precedence over its attempt's.
    """
    return step.dropped or attempt_drop_reason(trajectory)


class StepOutcome(NamedTuple):
    """State of a step, with the reason if it is dropped."""

    state: StepState
    reason: DropReason | None = None


def outcome_when_recorded(trajectory: Trajectory, step: Step, split: str) -> StepOutcome:
    """Return the state of a newly recorded step. Evaluated steps are not dropped with their attempt: they count."""
    reason = step_drop_reason(trajectory, step) if split == "train" else step.dropped
    if reason is not None:
        return StepOutcome(StepState.DROPPED, reason)
    return StepOutcome(StepState.RECORDED if split == "train" else StepState.EVALUATED)


class DroppedStep(NamedTuple):
    """A recorded step that is not trained: its number in its trajectory, and the reason."""

    trajectory_id: str
    step: int
    reason: DropReason


def dropped_steps(groups: Iterable[Group]) -> Iterator[DroppedStep]:
    """Yield all steps of training groups that are not trained, in order."""
    for trajectory in (t for group in groups for t in group.everyone):
        for number, step in enumerate(trajectory.steps):
            reason = step_drop_reason(trajectory, step)
            if reason is not None:
                yield DroppedStep(trajectory.trajectory_id, number, reason)


# Decisions about whole attempts and groups


def reject_reason(group: Group, least: int) -> DropReason | None:
    """Return why a finished group is not trained, or None.

    least: required attempts with a reward, both as played (otherwise `failed`) and as trained (otherwise `overlong`).
    """
    if sum(t.reward is not None for t in group.trajectories) < least:
        return DropReason.FAILED
    if sum(as_trained(t).reward is not None for t in group.trajectories) < least:
        return DropReason.OVERLONG
    return None


def trains(group: Group) -> bool:
    """Return whether any step of the group is trained."""
    return any(as_trained(t).steps for t in group.everyone)


def by_role(groups: Sequence[Group]) -> list[Group]:
    """Split groups by role for training, so that baselines compare only attempts of one role.

    A group without copies is returned unchanged. Otherwise its copies follow as groups of the same id, by role.
    """
    made: list[Group] = []
    for group in groups:
        made.append(group)
        copies = [copy for t in group.trajectories for copy in t.copies]
        for role in sorted({copy.role for copy in copies}):
            made.append(replace(group, trajectories=tuple(copy for copy in copies if copy.role == role)))
    return made


def leave_out(group: Group, reason: DropReason, only: Container[str] | None = None) -> Group:
    """Leave attempts out of training, each for `reason` unless it has an earlier one.

    only: ids of the trajectories to leave out; default: all.
    """
    return _changed(
        group, lambda t: replace(t, dropped=t.dropped or reason) if only is None or t.trajectory_id in only else t
    )


def without_stale(group: Group, oldest: int) -> Group:
    """Drop steps with a token older than version `oldest`; returns the same group if there are none."""

    def stale(step: Step) -> bool:
        return step.dropped is None and bool((step.policy_versions < oldest).any())

    if not any(stale(step) for t in group.everyone for step in t.steps):
        return group
    return _changed(
        group,
        lambda t: replace(t, steps=tuple(replace(s, dropped=DropReason.STALE) if stale(s) else s for s in t.steps)),
    )


def _changed(group: Group, change: Callable[[Trajectory], Trajectory]) -> Group:
    """Apply `change` to each trajectory and its copies."""

    def both(t: Trajectory) -> Trajectory:
        return replace(change(t), copies=tuple(map(change, t.copies))) if t.copies else change(t)

    return replace(group, trajectories=tuple(map(both, group.trajectories)))


def without_summaries(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with its summaries played but not trained."""
    marked = (replace(s, dropped=DropReason.MASKED) if s.summary and s.dropped is None else s for s in trajectory.steps)
    return replace(trajectory, steps=tuple(marked))


def computed_tokens(steps: Iterable[Step]) -> int:
    """Return the tokens computed by an engine that caches the previous call: sampled plus newly read ones.

    Newly read are prompt tokens after the longest common prefix with the previous call's prompt and completion. For
    text-only calls, the growth of the prompt counts.
    """
    total, before, count, steps = 0, np.empty(0, np.int32), 0, [*steps]
    for step, ids in zip(steps, seen_ids(steps), strict=True):
        known = min(step.prompt_tokens, count if step.is_text else common_prefix(ids, before))
        count = step.prompt_tokens + step.completion_tokens
        total += count - known
        before = ids
    return total


def reason_on_record(reward: float | None, trained_reward: float | None) -> DropReason | None:
    """Return `Trajectory.dropped` of a recorded attempt; so far only shaping can have dropped one with a reward."""
    return DropReason.OVERLONG if reward is not None and trained_reward is None else None


def interrupted_reason(repeats: bool) -> DropReason:
    """Return why a resumed run drops recorded steps that it cannot continue.

    A run that repeats bit for bit samples the same ones again; otherwise the weights that sampled them are lost.
    """
    return DropReason.RESAMPLED if repeats else DropReason.ROLLED_BACK
