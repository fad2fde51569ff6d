"""What a run says of its rewards: metrics by component, and once what has no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from treadle.algorithms.estimators import Advantage
from treadle.core.rewards import PLAIN
from treadle.core.types import Group, Trajectory
from treadle.orchestration.config import RunConfig


def reward_metrics(graded: Sequence[Trajectory]) -> dict[str, float | None]:
    """Beside the mean reward, where they say more: by component, and what is trained.

    reward_NAME_mean: of each component's sum over a trajectory, before weights, if there are named ones.
    shaped_reward_mean: of what is trained; overlong_dropped: trajectories left out of it. Both only if
    shaping did anything.
    """
    found: dict[str, float | None] = {}
    given = [t.components for t in graded]
    names = {name for components in given for name in components}
    if names - {PLAIN}:
        found |= {f"reward_{name}_mean": sum(c.get(name, 0.0) for c in given) / len(given) for name in sorted(names)}
    if any(t.dropped is not None or any(step.shaping for step in t.steps) for t in graded):
        kept = [t.trained_reward for t in graded if t.trained_reward is not None]
        found["shaped_reward_mean"] = sum(kept) / len(kept) if kept else None
        found["overlong_dropped"] = len(graded) - len(kept)
    return found


def reward_notes(groups: Sequence[Group], config: RunConfig, advantage: Advantage, first: bool) -> Iterator[str]:
    """Rewards that the advantage does not look at in detail, and in a run's first batch names that nothing has."""
    trajectories = [t for group in groups for t in group.trajectories]
    name = config.algorithm.advantage
    early = any(step.reward or step.shaping for t in trajectories for step in t.live_steps[:-1])
    if early and not advantage.by_step:
        yield (
            f"the environment rewards single steps, of which algorithm.advantage {name} "
            "uses the sum alone; step_return, gigpo and reinforce++ use when each reward came"
        )
    by_token = any(step.given.tokens is not None for t in trajectories for step in t.live_steps)
    if by_token and not advantage.by_token:
        yield (
            f"there are rewards of single tokens, of which algorithm.advantage {name} "
            f"uses the sum over a {'step' if advantage.by_step else 'trajectory'} alone; reinforce++ and gae use each"
        )
    given = {component for t in trajectories for component in t.components}
    judged = config.evaluation.success_of
    named = {"rewards.weights": [*config.rewards.weights], "evaluation.success_of": [judged] if judged else []}
    for option, components in named.items():
        unknown = [component for component in components if component not in given]
        if first and unknown and any(t.reward is not None for t in trajectories):
            had = ", ".join(sorted(given)) or "none"
            yield f"{option}: nothing in the first batch was given as {', '.join(unknown)}; components: {had}"
