"""Advantage estimators against slow references written from their formulas, and by hand."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.algorithms import slow
from tests.algorithms.batches import Drawn, rewarded_batches, with_penalties
from tests.algorithms.slow import SlowGroup
from tests.models import make_group, make_step
from treadle.algorithms.advantages import returns
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import Rewards, Signals, advantages, by_name, segments, state_ids
from treadle.core.errors import DataError
from treadle.core.registry import names
from treadle.core.types import BreakCause, DropReason, Group, Step, Trajectory
from treadle.packing.breaks import parent_steps
from treadle.packing.flat import flatten

ids = np.array

Reference = Callable[[list[SlowGroup], Any], list[float]]


def _spread(groups: list[SlowGroup], found: list[list[list[float]]]) -> list[float]:
    """From an advantage of each step to one of each token."""
    return [
        a
        for group, of_group in zip(groups, found, strict=True)
        for t, of_steps in zip(group, of_group, strict=True)
        for step, a in zip(t.steps, of_steps, strict=True)
        for _ in step.mask
    ]


def _of_trajectories(estimate: Callable[[list[float], Any], list[float]]) -> Reference:
    def reference(groups: list[SlowGroup], options: Any) -> list[float]:
        found = [(group, estimate([t.reward for t in group], options)) for group in groups]
        return _spread(groups, [[[a] * len(t.steps) for t, a in zip(*pair, strict=True)] for pair in found])

    return reference


def _of_trained(estimate: Callable[[list[SlowGroup], Any], list[float]]) -> Reference:
    """From an advantage of each trained token; the others have 0."""

    def reference(groups: list[SlowGroup], options: Any) -> list[float]:
        found = iter(estimate(groups, options))
        return [next(found) if m else 0.0 for g in groups for t in g for step in t.steps for m in step.mask]

    return reference


def _of_main_steps(estimate: Callable[[SlowGroup, Any], list[list[float]]]) -> Reference:
    def reference(groups: list[SlowGroup], options: Any) -> list[float]:
        groups = with_penalties(groups)
        return _spread(groups, [slow.for_all_steps(g, estimate(slow.main_branch(g), options)) for g in groups])

    return reference


REFERENCES: dict[str, Reference] = {
    "grpo": _of_trajectories(lambda r, o: slow.grpo(r, o.norm_by_std)),
    "rloo": _of_trajectories(lambda r, o: slow.rloo(r)),
    "maxrl": _of_trajectories(lambda r, o: slow.maxrl(r)),
    "step_return": _of_main_steps(
        lambda g, o: (slow.segment_return if o.scope == "segment" else slow.step_return)(g, o.gamma)
    ),
    "gigpo": _of_main_steps(lambda g, o: slow.gigpo(g, o.gamma, o.weight, o.norm_by_std)),
    "reinforce++": _of_trained(lambda groups, o: slow.reinforce_plus_plus(groups, o.gamma)),
    "reinforce++_baseline": _of_trained(lambda groups, o: slow.reinforce_plus_plus_baseline(groups)),
    "forks": _of_trajectories(lambda r, o: slow.rloo(r)),  # no attempt branches here
    "gae": _of_trained(lambda groups, o: [a for g in groups for t in g for a in slow.gae(t, o.gamma, o.gae_lambda)]),
}
OPTIONS: dict[str, list[Any]] = {
    "norm_by_std": [True, False],
    "gamma": [1.0, 0.9, 0.5],
    "gae_lambda": [1.0, 0.8, 0.0],
    "weight": [1.0, 0.3],
    "scope": ["step", "segment"],
    "baseline": ["fork", "tree"],
}


def test_every_registered_advantage_has_a_reference() -> None:
    assert set(REFERENCES) == set(names("advantages"))


@pytest.mark.parametrize("name", REFERENCES)
@settings(max_examples=30)
@given(drawn=rewarded_batches(), data=st.data())
def test_an_advantage_is_its_formula(name: str, drawn: Drawn, data: st.DataObject) -> None:
    options_type = by_name(name).options_type
    options = {option: data.draw(st.sampled_from(OPTIONS[option])) for option in options_type.model_fields}
    config = AlgorithmConfig(advantage=name, advantage_options=options)
    penalised = name != "maxrl" and data.draw(st.booleans())
    signals = Signals(drawn.penalty if penalised else None, drawn.values)
    if name == "maxrl" and (drawn.batch.rewards < 0).any():
        with pytest.raises(DataError, match="needs rewards >= 0"):
            advantages(drawn.batch, config, signals)
        return
    found = advantages(drawn.batch, config, signals)
    assert found.dtype == np.float64 and found.shape == (len(drawn.batch),)
    wanted = REFERENCES[name](drawn.slow(penalised), options_type(**options))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-7)


@given(rewarded_batches(), st.booleans())
def test_rewards_add_up_from_level_to_level(drawn: Drawn, penalised: bool) -> None:
    batch = drawn.batch
    rewards = Rewards.of(batch, Signals(drawn.penalty if penalised else None))
    steps = np.bincount(batch.trajectory_of_step, rewards.step, len(batch.trajectories))
    tokens = np.bincount(batch.trajectory_id, rewards.token, len(batch.trajectories))
    has_steps = np.array([bool(t.steps) for t in batch.trajectories], np.bool_)
    np.testing.assert_allclose(steps[has_steps], rewards.trajectory[has_steps], atol=1e-12)
    assert not rewards.token[~batch.mask].any()
    for j, trajectory in enumerate(batch.trajectories):
        if trajectory.steps and trajectory.steps[0].mask[:1].any():  # else the first rewards may be nobody's
            assert tokens[j] == pytest.approx(rewards.trajectory[j])


# Steps that are left out


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["grpo", "rloo", "step_return", "gigpo"])
@given(drawn=rewarded_batches(), data=st.data())
def test_an_advantage_is_the_same_whichever_steps_became_stale(name: str, drawn: Drawn, data: st.DataObject) -> None:
    """What they were given stays part of the returns, and turns keep their numbers."""
    options_type = by_name(name).options_type
    options = {option: data.draw(st.sampled_from(OPTIONS[option])) for option in options_type.model_fields}
    config = AlgorithmConfig(advantage=name, advantage_options=options)
    groups, kept = without_some(drawn.groups, data)
    np.testing.assert_array_equal(advantages(flatten(groups), config), advantages(drawn.batch, config)[kept])


@given(drawn=rewarded_batches(), data=st.data())
def test_returns_of_tokens_are_the_same_whichever_steps_became_stale(drawn: Drawn, data: st.DataObject) -> None:
    """Nobody earned what was given before the first token that is left."""
    groups, kept = without_some(drawn.groups, data)
    whole, left = (
        returns(Rewards.of(batch, Signals()).token, batch.trajectory_id, 1.0)[batch.mask]
        for batch in (drawn.batch, flatten(groups))
    )
    np.testing.assert_allclose(left, whole[kept[drawn.batch.mask]], atol=1e-12)


def without_some(groups: list[Group], data: st.DataObject) -> tuple[list[Group], NDArray[np.bool_]]:
    """The groups with some steps stale, and which tokens of their batch are left: bool[N]."""
    kept: list[bool] = []

    def marked(step: Step, graded: bool) -> Step:
        stale = data.draw(st.booleans())
        kept.extend([not stale] * len(step.mask) * graded)
        return replace(step, dropped=DropReason.STALE) if stale else step

    def each(t: Trajectory) -> Trajectory:
        return replace(t, steps=tuple(marked(step, t.reward is not None) for step in t.steps))

    made = [replace(group, trajectories=tuple(map(each, group.trajectories))) for group in groups]
    return made, np.array(kept, np.bool_)


# By hand


def test_states_are_equal_states_within_a_group() -> None:
    a, b = make_step([1, 2], [3]), make_step([1, 2], [4])
    longer, same_bytes = make_step([1, 2, 0], [3]), make_step([1], [2, 3])
    batch = flatten([make_group([([a, longer], 1.0), ([b, same_bytes, a], 0.0)]), make_group([([a], 0.0)], 1)])
    assert state_ids(batch).tolist() == [0, 1, 0, 2, 0, 3]
    a, b, c = (replace(step, state_key=key) for step, key in ((a, "x"), (b, "y"), (longer, "x")))
    batch = flatten([make_group([([a, b], 1.0), ([c, same_bytes], 0.0)]), make_group([([a], 0.0)], 1)])
    assert state_ids(batch).tolist() == [0, 1, 0, 2, 3]


def test_gae_without_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs the values of a value head"):
        advantages(flatten([]), AlgorithmConfig(advantage="gae"))


# What must be exactly nothing


@pytest.mark.parametrize("name", [name for name in names("advantages") if by_name(name).by_group])
@pytest.mark.parametrize("reward", [0.7, 0.1, 1 / 3, 0.0])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_equal_rewards_at_the_end_give_exactly_nothing(name: str, size: int, reward: float) -> None:
    """Whatever else is in the update."""
    steps: list[Step] = [make_step([1], [2, 3]), make_step([1, 2, 3], [4])]
    equal = make_group([(steps, reward)] * size)
    other = make_group([(steps, 1.0), (steps, 0.0), (steps[:1], 0.0)], 1)
    found = advantages(flatten([equal, other]), AlgorithmConfig(advantage=name))
    assert found[: 3 * size].tolist() == [0.0] * (3 * size)
    assert found[3 * size :].any()


@pytest.mark.parametrize("name", names("advantages"))
@pytest.mark.parametrize("groups", [[], [make_group([])], [make_group([([], 1.0), ([], 0.0)])]])
def test_nothing_to_train_is_no_error(name: str, groups: list[Any]) -> None:
    batch = flatten(groups)
    found: NDArray[np.float64] = advantages(batch, AlgorithmConfig(advantage=name), Signals(values=np.empty(0)))
    assert found.shape == (0,)


# Segments


def played(*segments: list[float], summaries: bool = True) -> list[Step]:
    """An episode's steps, each given a reward: `[0, 1], [0.5]` has a summary after two replies, then another reply."""
    steps, opening = [], [1, 2]
    for number, rewards in enumerate(segments):
        prompt, cause = [*opening, *([9] * number)], BreakCause.SUMMARY if number else None
        for reward in rewards:
            steps.append(replace(make_step(prompt, [3, 4]), reward=reward, break_cause=cause))
            prompt, cause = [*prompt, 3, 4, 5], None
        if summaries and number + 1 < len(segments):
            steps.append(replace(make_step([*prompt, 6], [7]), summary=True))
    return steps


@pytest.mark.parametrize(
    ("gamma", "wanted"),
    [
        # returns of segments: 1.75 and 0.75; 0.25; 2 and 1.5 and 1
        (1.0, [[1.75 - 1.125] * 3 + [0.75 - 1.5], [0.25 - 1.875], [2 - 1] * 3 + [1.5 - 0.75] * 2 + [1 - (1 - 1)]]),
        # 1.375 and 0.75; 0.25; 1 and 1 and 1
        (0.5, [[1.375 - 0.625] * 3 + [0.75 - 1], [0.25 - 1.1875], [1 - 0.8125] * 3 + [1 - 0.75] * 2 + [1 - 0.0625]]),
    ],
)
def test_segments_are_compared_by_number_and_share_a_return(gamma: float, wanted: list[list[float]]) -> None:
    """A summary has the return of the segment that it ends. The third segment has no other to be compared with."""
    attempts = [played([0, 1], [0.75]), played([0.25]), played([0.25, 0.25], [0.5], [1])]
    rewards = [sum(step.reward for step in steps) for steps in attempts]
    batch = flatten([make_group(list(zip(attempts, rewards, strict=True)))])
    config = AlgorithmConfig(advantage="step_return", advantage_options={"scope": "segment", "gamma": gamma})
    found = np.split(advantages(batch, config), batch.step_start[1:-1])
    assert [set(tokens) == {tokens[0]} for tokens in found] == [True] * len(found)
    assert [tokens[0] for tokens in found] == pytest.approx([a for attempt in wanted for a in attempt])


@given(drawn=rewarded_batches(), data=st.data())
def test_the_rewards_of_segments_add_up_to_the_episode(drawn: Drawn, data: st.DataObject) -> None:
    """Also if some of their steps became stale."""
    groups, _ = without_some(drawn.groups, data)
    batch = flatten(groups)
    main = np.flatnonzero(parent_steps(batch) == np.arange(len(batch.played)))
    paid = np.bincount(parent_steps(batch), batch.played_rewards, len(batch.played))[main]
    segment = segments(batch, main)
    earned = np.bincount(segment, paid)
    first = np.searchsorted(segment, np.arange(len(earned)))
    totals = np.bincount(batch.trajectory_of_played[main][first], earned, len(batch.trajectories))
    played = np.bincount(batch.trajectory_of_played, minlength=len(batch.trajectories)) > 0
    np.testing.assert_allclose(totals[played], batch.rewards[played], atol=1e-12)


def test_without_summaries_an_episode_is_one_segment() -> None:
    attempts = [(played([0.0, 1.0, 0.5]), 1.5), (played([0.25]), 0.25), (played([0.0, 0.0]), 0.0)]
    batch = flatten([make_group(attempts)])
    config = AlgorithmConfig(advantage="step_return", advantage_options={"scope": "segment"})
    np.testing.assert_array_equal(advantages(batch, config), advantages(batch, AlgorithmConfig(advantage="rloo")))
