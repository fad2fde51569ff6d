"""One regression test for each known mistake of published step-wise trainers that concerns these functions.

The others are about the loop: filters and batches over rows (dynamic sampling), stale length checks, shuffles, metrics
by step, the `latest` pointer. Temperatures: tests/training/test_learner.py.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.models import distance, exact, make_group, make_step, norm, random_groups
from tests.training.reference import accumulated, algorithm_with, earlier_policy, make_learner
from treadle.algorithms.config import AlgorithmConfig, CorrectionConfig
from treadle.algorithms.corrections import corrected
from treadle.algorithms.estimators import Signals, advantages, by_name
from treadle.algorithms.losses import Tokens
from treadle.algorithms.reductions import token_weights
from treadle.core.registry import names
from treadle.core.types import Group, Step
from treadle.packing.flat import FlatBatch, flatten

ADVANTAGES = names("advantages")
LOSSES = names("policy_losses")


def of_tokens(batch: FlatBatch, name: str, values: float = 0.3) -> NDArray[np.float64]:
    return advantages(batch, AlgorithmConfig(advantage=name), Signals(values=np.full(len(batch), values)))


def rewarded(steps: Sequence[Step], *rewards: float) -> list[Step]:
    return [replace(step, reward=reward) for step, reward in zip(steps, rewards, strict=True)]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_last_steps_mask_does_not_decide_for_other_steps(name: str) -> None:
    """Advantages used to be broadcast under the mask of the last row: longer earlier steps lost or gained tokens."""
    first = make_step([1, 2], [3, 4, 5, 6], mask=[True, True, True, True])
    last = make_step([1, 2, 3, 4, 5, 6, 7], [8, 9], mask=[False, True])
    batch = flatten([make_group([([first, last], 1.0), ([make_step([1, 2], [9])], 0.0)])])
    found = of_tokens(batch, name)
    assert found[:4].all() and found[5]
    assert (token_weights(batch, AlgorithmConfig()) > 0).tolist() == [True] * 4 + [False, True, True]


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++_baseline", "gae"])
def test_nothing_untrained_enters_whitening_or_returns(name: str) -> None:
    """Padding rows used to: here masked tokens and greedy, empty and failed steps change no trained token's value."""
    random = random_groups(0, groups=2, size=2, steps=2)
    clean = flatten(random)
    padded = []
    for group in random:
        trajectories = []
        for t in group.trajectories:
            greedy, empty = make_step([1, 2, 3], [4, 5, 6], 0.0), make_step([4], [])
            masked = make_step([5], [6, 7], mask=[False, False])
            trajectories.append((rewarded([t.steps[0], greedy, t.steps[1], empty, masked], 0, 0, 0, 0, 0), t.reward))
        padded.append(make_group([*trajectories, ([make_step([1], [2, 3])], None)], group.index))
    batch = flatten(padded)
    np.testing.assert_allclose(of_tokens(batch, name)[batch.mask], of_tokens(clean, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if by_name(name).by_group])
def test_trajectories_without_steps_do_not_vanish_from_baselines(name: str) -> None:
    steps = [make_step([1], [2, 3])]
    group = [(steps, 1.0), (steps, 0.0)]
    without = of_tokens(flatten([make_group([*group])]), name)
    with_two = of_tokens(flatten([make_group([*group, ([], 1.0), ([], 1.0)])]), name)
    if name == "reinforce++_baseline":  # whitening takes a shift of all trained tokens away again
        np.testing.assert_allclose(without, with_two, rtol=1e-12)
    else:
        assert 0 < with_two[0] < without[0]
        assert of_tokens(flatten([make_group([(steps, 1.0), ([], 0.0)])]), name).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_failed_trajectories_are_no_reward_of_0(name: str) -> None:
    """Placeholder rows used to stand for them, in baselines and in counts."""
    steps = [make_step([1], [2, 3]), make_step([1, 2, 3], [4])]
    healthy = [(steps, 1.0), (steps[:1], 0.5), (steps, 0.25)]
    alone = flatten([make_group([*healthy])])
    beside = flatten([make_group([(steps, None), *healthy, ([], None)])])
    assert of_tokens(alone, name).tolist() == of_tokens(beside, name).tolist()
    for reduction in ("token_mean", "trajectory_mean", "step_mean", "task_mean", "seq_mean_token_sum_norm"):
        config = algorithm_with(reduction=reduction)
        assert token_weights(alone, config).tolist() == token_weights(beside, config).tolist()


def test_talkative_trajectories_do_not_dominate_sequence_reductions() -> None:
    """One trajectory of 9 steps and one of 1: by rows the first would weigh 9 times as much."""
    long, short = [make_step([i + 1], [2, 3]) for i in range(9)], [make_step([1], [2, 3])]
    batch = flatten([make_group([(long, 1.0), (short, 0.0)])])
    shares = np.bincount(batch.trajectory_id, token_weights(batch, AlgorithmConfig(reduction="trajectory_mean")))
    assert shares.tolist() == pytest.approx([0.5, 0.5])
    shares = np.bincount(batch.trajectory_id, token_weights(batch, AlgorithmConfig(reduction="step_mean")))
    assert shares.tolist() == pytest.approx([0.9, 0.1])


# Steps and the one sequence they make


def appended_groups(seed: int = 0) -> list[Group]:
    return random_groups(seed, groups=2, size=3, steps=3)


def concatenated(groups: Sequence[Group]) -> list[Group]:
    """Each append-only trajectory as a single step, whose mask leaves out what was observed between replies."""
    made = []
    for group in groups:
        trajectories = []
        for t in group.trajectories:
            opening = t.steps[0].prompt_ids
            whole = t.steps[-1].full_ids[len(opening) :]
            mask, logprobs = np.zeros(len(whole), np.bool_), np.full(len(whole), -3.3, np.float32)
            for step in t.steps:
                start = len(step.prompt_ids) - len(opening)
                mask[start : start + len(step.mask)] = step.mask
                logprobs[start : start + len(step.mask)] = step.logprobs
            trajectories.append(([make_step(opening, whole, mask=mask.tolist(), logprobs=logprobs)], t.reward))
        made.append(make_group(trajectories, group.index))
    return made


@pytest.mark.parametrize("name", ADVANTAGES)
def test_observed_tokens_are_in_no_return(name: str) -> None:
    """They cost no discount, have no advantage and enter no statistics: as if the steps were one sequence."""
    steps, whole = flatten(appended_groups()), flatten(concatenated(appended_groups()))
    options = {"gamma": 0.9} if name in ("reinforce++", "gae") else {}
    config = AlgorithmConfig(advantage=name, advantage_options=options)
    values = np.random.default_rng(0).normal(size=len(steps))
    spread = np.full(len(whole), 99.0)
    spread[whole.mask] = values
    found = advantages(whole, config, Signals(values=spread))[whole.mask]
    wanted = advantages(steps, config, Signals(values=values))
    if name == "gigpo":  # the same states are met by other steps
        assert (np.sign(found) == np.sign(wanted)).all()
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.quick(10)
@pytest.mark.parametrize("reduction", ["token_mean", "trajectory_mean", "task_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("loss", LOSSES)
def test_steps_train_as_the_one_sequence_that_they_make(loss: str, reduction: str) -> None:
    """Also where the ratio is of the whole trajectory; by rows it would not be."""
    groups, model = appended_groups(), exact()
    old = earlier_policy(model, groups)
    whole = concatenated(groups)
    spread = np.full(len(flatten(whole)), -3.3)
    spread[flatten(whole).mask] = old
    algorithm = algorithm_with(policy_loss=loss, reduction=reduction)
    wanted, _ = accumulated(make_learner(model, algorithm, packing="step"), whole, spread)
    found, _ = accumulated(make_learner(model, algorithm), groups, old)
    assert norm(wanted) > 1e-4
    assert distance(found, wanted) <= 1e-12 * norm(wanted)


def test_gspo_and_sequence_corrections_over_steps_are_something_else() -> None:
    """A guard for the test above: per row, as published trainers compute them, is not per trajectory."""
    groups, model = appended_groups(), exact()
    old = earlier_policy(model, groups)
    bounds = {"eps_low": 0.05, "eps_high": 0.05}
    learners = [
        make_learner(model, AlgorithmConfig(policy_loss="gspo", policy_loss_options=options))
        for options in (bounds, {**bounds, "scope": "step"})
    ]
    one, other = (accumulated(learner, groups, old)[0] for learner in learners)
    assert distance(one, other) > 1e-2 * norm(one)


def test_corrections_are_over_trajectories_not_rows() -> None:
    steps, whole = appended_groups(), concatenated(appended_groups())
    config = CorrectionConfig(
        sequence_tis=2.0, geometric_mask=(0.93, 1.05), product_mask=(0.1, 5.0), outlier_mask=(0.3, 4.0)
    )
    log_rho = np.random.default_rng(3).normal(0, 0.3, len(flatten(steps)))
    found = []
    for groups in (steps, whole):
        batch = flatten(groups)
        mask = torch.from_numpy(batch.mask)
        rollout = torch.from_numpy(batch.logp_rollout).double()
        old = rollout + 50.0
        old[mask] = rollout[mask] + torch.from_numpy(log_rho)
        ids = (torch.from_numpy(batch.step_id), torch.from_numpy(batch.trajectory_id))
        tokens = Tokens(old, rollout, torch.zeros(len(batch)), mask, *ids)
        result = corrected(tokens, mask.double(), config, lambda mask: mask.double())
        found.append((result.factor[mask], result.keep[mask]))
    (factor, keep), (wanted, kept) = found
    torch.testing.assert_close(factor, wanted, rtol=1e-10, atol=0.0)
    assert (keep == kept).all() and keep.any() and not keep.all()


# Rewards of steps


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if by_name(name).by_step])
def test_rewards_of_steps_are_credited_to_what_came_before_them(name: str) -> None:
    """An estimator that is said to use them does: the same sum, given earlier, leaves later steps less."""
    steps = [make_step([1], [2, 3]), make_step([9], [4, 5])]
    early, late = rewarded(steps, 1.0, 0.0), rewarded(steps, 0.0, 1.0)
    none = rewarded(steps, 0.0, 0.0)
    found = [of_tokens(flatten([make_group([(own, 1.0), (none, 0.0)])]), name, 0.0) for own in (early, late)]
    assert found[0][2] < found[1][2]


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if not by_name(name).by_step])
def test_the_others_use_their_sum(name: str) -> None:
    steps = [make_step([1], [2, 3]), make_step([9], [4, 5])]
    none = rewarded(steps, 0.0, 0.0)
    one, other = (
        of_tokens(flatten([make_group([(rewarded(steps, *r), 1.0), (none, 0.0)])]), name) for r in ((1, 0), (0, 1))
    )
    assert one.tolist() == other.tolist() and one.any()
