"""Notes on rewards that have no effect, reported once in a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from treadle.algorithms.estimators import Advantage
from treadle.core.outcomes import as_played
from treadle.core.types import Group
from treadle.orchestration.config import RunConfig


def reward_notes(groups: Sequence[Group], config: RunConfig, advantage: Advantage, first: bool) -> Iterator[str]:
    """Yield a line for rewards whose detail the advantage ignores, and in the first batch for names that no reward has.

    first: the groups are the run's first batch, by which the names of components in the configuration are checked.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    name = config.algorithm.advantage
    early = any(step.reward or step.shaping for t in trajectories for step in as_played(t).steps[:-1])
    if early and not advantage.by_step:
        yield (
            f"the environment rewards single steps, of which algorithm.advantage {name} "
            "uses the sum alone; step_return, gigpo and reinforce++ use when each reward came"
        )
    by_token = any(step.given.tokens is not None for t in trajectories for step in as_played(t).steps)
    if by_token and not advantage.by_token:
        yield (
            f"there are rewards of single tokens, of which algorithm.advantage {name} "
            f"uses the sum over a {'step' if advantage.by_step else 'trajectory'} alone; reinforce++ and gae use each"
        )
    names = {component for t in trajectories for component in as_played(t).components}
    judged = config.evaluation.success_of
    named = {"rewards.weights": [*config.rewards.weights], "evaluation.success_of": [judged] if judged else []}
    for option, components in named.items():
        unknown = [component for component in components if component not in names]
        if first and unknown and any(t.reward is not None for t in trajectories):
            had = ", ".join(sorted(names)) or "none"
            yield f"{option}: nothing in the first batch was given as {', '.join(unknown)}; components: {had}"
