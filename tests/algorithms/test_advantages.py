"""Advantage estimators against slow references written from their formulas, and by hand."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.algorithms import slow
from tests.algorithms.batches import Drawn, rewarded_batches, with_penalties
from tests.algorithms.slow import SlowGroup
from tests.models import make_group, make_step
from treadle.algorithms.advantages import (
    gae,
    gigpo,
    maxrl,
    moved_to_trainable,
    paid_to_tokens,
    reinforce_plus_plus,
    returns,
    rloo,
    step_return,
    whiten,
)
from treadle.algorithms.config import AlgorithmConfig
from treadle.algorithms.estimators import Rewards, Signals, advantages, by_name, state_ids
from treadle.core.errors import DataError
from treadle.core.registry import names
from treadle.core.types import DropReason, Group, Step, Trajectory
from treadle.packing.flat import FlatBatch, flatten

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
    "step_return": _of_main_steps(lambda g, o: slow.step_return(g, o.gamma)),
    "gigpo": _of_main_steps(lambda g, o: slow.gigpo(g, o.gamma, o.weight, o.norm_by_std)),
    "reinforce++": _of_trained(lambda groups, o: slow.reinforce_plus_plus(groups, o.gamma)),
    "reinforce++_baseline": _of_trained(lambda groups, o: slow.reinforce_plus_plus_baseline(groups)),
    "gae": _of_trained(lambda groups, o: [a for g in groups for t in g for a in slow.gae(t, o.gamma, o.gae_lambda)]),
}
OPTIONS: dict[str, list[Any]] = {
    "norm_by_std": [True, False],
    "gamma": [1.0, 0.9, 0.5],
    "gae_lambda": [1.0, 0.8, 0.0],
    "weight": [1.0, 0.3],
}


def test_every_registered_advantage_has_a_reference() -> None:
    assert set(REFERENCES) == set(names("advantages"))


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", REFERENCES)
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
    rewards = Rewards.of(batch, drawn.penalty if penalised else None)
    steps = np.bincount(batch.trajectory_of_step, rewards.step, len(batch.trajectories))
    tokens = np.bincount(batch.trajectory_id, rewards.token, len(batch.trajectories))
    has_steps = np.array([bool(t.steps) for t in batch.trajectories], np.bool_)
    np.testing.assert_allclose(steps[has_steps], rewards.trajectory[has_steps], atol=1e-12)
    assert not rewards.token[~batch.mask].any()
    for j, trajectory in enumerate(batch.trajectories):
        if trajectory.steps and trajectory.steps[0].mask[:1].any():  # else the first rewards may be nobody's
            assert tokens[j] == pytest.approx(rewards.trajectory[j])


@given(rewarded_batches())
def test_what_single_tokens_were_given_stays_with_them_if_they_are_trained(drawn: Drawn) -> None:
    batch = drawn.batch
    bare = replace(batch, token_rewards=np.zeros(len(batch)), played_rewards=batch.played_rewards - _by_step(batch))
    extra = Rewards.of(batch, None).token - Rewards.of(bare, None).token
    everyone = replace(batch, mask=np.ones(len(batch), np.bool_))
    np.testing.assert_allclose(_own(everyone), batch.token_rewards, atol=1e-12)
    np.testing.assert_allclose(extra, _own(batch), atol=1e-12)


def _own(batch: FlatBatch) -> Any:
    return moved_to_trainable(batch.token_rewards, batch.trajectory_id, batch.mask)


def _by_step(batch: FlatBatch) -> Any:
    return np.bincount(batch.step_id, batch.token_rewards, len(batch.steps))


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
        returns(Rewards.of(batch, None).token, batch.trajectory_id, 1.0)[batch.mask]
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


def test_step_return_goes_on_counting_where_early_steps_are_stale() -> None:
    """Both were paid 4 for the first of three turns; one was so slow that it is not trained any more."""
    steps = [replace(make_step([1] * (n + 1), [2]), reward=r) for n, r in enumerate((4.0, 0.0, 1.0))]
    slow = [replace(steps[0], dropped=DropReason.STALE), *steps[1:]]
    others = [replace(steps[0], reward=4.0), replace(steps[1], reward=2.0), replace(steps[2], reward=0.5)]
    batch = flatten([make_group([(slow, 5.0), (others, 6.5)])])
    assert batch.rewards.tolist() == [5.0, 6.5]
    assert np.bincount(batch.trajectory_of_played, batch.played_rewards).tolist() == [5.0, 6.5]
    found = advantages(batch, AlgorithmConfig(advantage="step_return"))
    # G = 5, 1, 1 and 6.5, 2.5, 0.5
    assert found.tolist() == [-1.5, 0.5, 1.5, 1.5, -0.5]


# By hand


def test_rloo_by_hand() -> None:
    assert rloo(ids([1.0, 0.0, 0.0, 5.0]), ids([0, 0, 0, 1])).tolist() == pytest.approx([1, -0.5, -0.5, 0])


def test_maxrl_by_hand() -> None:
    assert maxrl(ids([1.0, 0.0, 0.0, 0.0]), ids([0, 0, 0, 0])).tolist() == pytest.approx([3, -1, -1, -1])
    assert maxrl(ids([0.0, 0.0]), ids([0, 0])).tolist() == [0, 0]
    with pytest.raises(DataError, match=r"needs rewards >= 0, got -1.0; choose"):
        maxrl(ids([1.0, -1.0]), ids([0, 0]))


def test_step_return_by_hand() -> None:
    """Two trajectories with three and one steps: the second step of the first has nobody beside it."""
    found = step_return(ids([4.0, 2.0]), ids([1.0, 0.0, 3.0, 2.0]), ids([0, 0, 0, 1]), ids([0, 0]), 1.0)
    # t=0: 4 - 2; t=1: 3 - (2 - 1); t=2: 3 - (2 - 1)
    assert found.tolist() == [2.0, 2.0, 2.0, -2.0]
    found = step_return(ids([4.0, 2.0]), ids([1.0, 0.0, 3.0, 2.0]), ids([0, 0, 0, 1]), ids([0, 0]), 0.5)
    # G = 1.75, 1.5, 3; t=1: 1.5 - (2 - 1); t=2: 3 - (2 - 1)
    assert found.tolist() == [-0.25, 0.5, 2.0, 0.25]
    found = step_return(ids([1.0, 0.0]), ids([0.0, 1.0, 1.0, -1.0]), ids([0, 0, 1, 1]), ids([0, 0]), 1.0)
    assert found.tolist() == [1.0, 2.0, -1.0, -2.0]  # G = 1, 1 against 0, -1


def test_step_return_with_a_reward_at_the_end_is_rloo_for_all_steps() -> None:
    rewards = ids([1.0, 0.0, 0.5])
    of_step = ids([0, 0, 1, 1, 2, 2])
    found = step_return(rewards, ids([0, 1.0, 0, 0, 0, 0.5]), of_step, ids([0, 0, 0]), 1.0)
    np.testing.assert_allclose(found, rloo(rewards, ids([0, 0, 0]))[of_step], rtol=1e-15)


def test_the_baseline_of_step_return_does_not_bias_the_gradient() -> None:
    """Exactly, by enumeration: sum over all pairs of episodes of p * A * d log p equals the policy gradient.

    A bandit of up to two steps: each step ends the episode (reward 1) or goes on (reward -0.5, at most once more);
    the same probability q of ending at both steps. The value is q + (1 - q)(-0.5 + (q * 1 + (1 - q) * 3)).
    """
    q = 0.3
    episodes = {("end",): q, ("on", "end"): (1 - q) * q, ("on", "on"): (1 - q) ** 2}
    rewards = {("end",): [1.0], ("on", "end"): [-0.5, 1.0], ("on", "on"): [-0.5, 3.0]}

    def score(action: str) -> float:  # d log p / dq
        return 1 / q if action == "end" else -1 / (1 - q)

    for gamma in (1.0, 0.7):
        gradient = 0.0
        for one, other in itertools.product(episodes, repeat=2):
            steps = [*rewards[one], *rewards[other]]
            of = [0] * len(one) + [1] * len(other)
            totals = ids([slow.discounted(rewards[one], gamma), slow.discounted(rewards[other], gamma)])
            advantage = step_return(totals, ids(steps), ids(of), ids([0, 0]), gamma)[: len(one)]
            share = sum(a * score(action) for a, action in zip(advantage, one, strict=True))
            gradient += episodes[one] * episodes[other] * share
        plain = sum(
            p * sum(slow.discounted(rewards[e][t:], gamma) * score(a) for t, a in enumerate(e))
            for e, p in episodes.items()
        )
        assert gradient == pytest.approx(plain, rel=1e-12)


def test_gigpo_by_hand() -> None:
    """Two trajectories meet state 7 with returns 1 and 0; elsewhere a step is alone with its state."""
    found = gigpo(
        ids([1.0, 0.0]), ids([0, 1.0, 0, 0]), ids([0, 0, 1, 1]), ids([0, 0]), ids([7, 8, 7, 9]), 1.0, 2.0, False
    )
    assert found.tolist() == [0.5 + 2 * 0.5, 0.5, -0.5 - 2 * 0.5, -0.5]


def test_states_are_equal_states_within_a_group() -> None:
    a, b = make_step([1, 2], [3]), make_step([1, 2], [4])
    longer, same_bytes = make_step([1, 2, 0], [3]), make_step([1], [2, 3])
    batch = flatten([make_group([([a, longer], 1.0), ([b, same_bytes, a], 0.0)]), make_group([([a], 0.0)], 1)])
    assert state_ids(batch).tolist() == [0, 1, 0, 2, 0, 3]
    a, b, c = (replace(step, state_key=key) for step, key in ((a, "x"), (b, "y"), (longer, "x")))
    batch = flatten([make_group([([a, b], 1.0), ([c, same_bytes], 0.0)]), make_group([([a], 0.0)], 1)])
    assert state_ids(batch).tolist() == [0, 1, 0, 2, 3]


def test_reinforce_plus_plus_by_hand() -> None:
    """One trajectory of two trained tokens with an observation between them: returns 0.5 and 1, whitened."""
    mask = ids([True, False, True])
    found = reinforce_plus_plus(ids([0, 0, 1.0]), mask, ids([0, 0, 0]), 0.5)
    std = math.sqrt(2 * 0.25**2)
    assert found.tolist() == pytest.approx([-0.25 / (std + 1e-6), 0, 0.25 / (std + 1e-6)])


def test_gae_by_hand() -> None:
    values = ids([0.5, 9.0, 0.25, 0.1])
    mask, owner = ids([True, False, True, True]), ids([0, 0, 0, 1])
    found = gae(ids([0.0, 0.0, 1.0, 0.0]), values, mask, owner, 0.9, 0.5)
    last = 1 - 0.25
    assert found.tolist() == pytest.approx([0.9 * 0.25 - 0.5 + 0.45 * last, 0, last, -0.1])


def test_gae_with_lambda_1_is_the_return_less_the_value_and_with_0_one_error() -> None:
    random = np.random.default_rng(0)
    rewards, values, mask = random.normal(size=9), random.normal(size=9), np.ones(9, np.bool_)
    owner = np.repeat([0, 1], [4, 5])
    np.testing.assert_allclose(gae(rewards, values, mask, owner, 0.9, 1.0), returns(rewards, owner, 0.9) - values)
    after = np.array([*values[1:4], 0, *values[5:], 0])
    np.testing.assert_allclose(gae(rewards, values, mask, owner, 0.9, 0.0), rewards + 0.9 * after - values)


def test_gae_without_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs the values of a value head"):
        advantages(flatten([]), AlgorithmConfig(advantage="gae"))


def test_whitened_values_have_mean_0_and_standard_deviation_1() -> None:
    values = whiten(np.random.default_rng(0).normal(3, 5, 1000))
    assert values.mean() == pytest.approx(0, abs=1e-12) and values.std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert whiten(np.full(7, 0.7)).tolist() == [0.0] * 7 and whiten(np.empty(0)).tolist() == []


def test_a_reward_is_paid_to_the_last_trainable_token_before_it() -> None:
    """Step 0 has no trainable token, step 2 neither; trajectory 1 has none at all."""
    step, of_trajectory = ids([0, 1, 1, 2, 3, 4]), ids([0, 0, 0, 0, 1])
    mask = ids([False, True, False, False, True, False])
    found = paid_to_tokens(ids([10.0, 1.0, 2.0, 4.0, 100.0]), of_trajectory, step, mask)
    assert found.tolist() == [0, 3.0, 0, 0, 4.0, 0]


def test_a_token_reward_moves_to_the_last_trainable_token_before_it_and_never_to_another_trajectory() -> None:
    found = moved_to_trainable(ids([1.0, 2, 4, 8, 16, 32]), ids([0, 0, 0, 0, 1, 1]), ids([0, 1, 0, 1, 0, 1]) > 0)
    assert found.tolist() == [0, 6, 0, 8, 0, 32]


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


@pytest.mark.parametrize("name", [name for name in names("advantages") if not by_name(name).by_group])
def test_a_group_of_one_is_trained_where_there_is_no_group_baseline(name: str) -> None:
    groups = [make_group([([make_step([1], [2, 3])], reward)], i) for i, reward in enumerate((1.0, 0.0))]
    batch = flatten(groups)
    assert advantages(batch, AlgorithmConfig(advantage=name), Signals(values=np.zeros(4))).any()


@pytest.mark.parametrize("name", names("advantages"))
@pytest.mark.parametrize("groups", [[], [make_group([])], [make_group([([], 1.0), ([], 0.0)])]])
def test_nothing_to_train_is_no_error(name: str, groups: list[Any]) -> None:
    batch = flatten(groups)
    found: NDArray[np.float64] = advantages(batch, AlgorithmConfig(advantage=name), Signals(values=np.empty(0)))
    assert found.shape == (0,)
