"""Loss, gradient and metrics are defined on (trajectory, step, token): no layout, budget or memory trick changes them.

In float64, with the norms in float64: what is left is the rounding of sums in another order.
"""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tests.models import (
    FAMILIES,
    SLIDING,
    distance,
    exact,
    full,
    gradients,
    make_group,
    make_step,
    norm,
    ragged_groups,
    random_groups,
    step_logprobs,
    weights_of,
)
from treadle.algorithms.config import AlgorithmConfig, advantages, token_weights
from treadle.core.types import Group
from treadle.packing.flat import FlatBatch, flatten
from treadle.packing.layout import Packing
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.learner import Learner

ALGORITHMS = {
    "token_mean": AlgorithmConfig(),
    "no std, entropy": AlgorithmConfig(norm_by_std=False, entropy_coef=0.05),
    "per trajectory": AlgorithmConfig(reduction="seq_mean_token_sum_norm", length_norm=10.0, entropy_coef=0.01),
    "per step": AlgorithmConfig(reduction="seq_mean_token_sum_norm", length_norm=3.0, scope="step"),
}
SAME_COST = ("packed_tokens", "packed_sequences")  # what a layout is there to change


def make_learner(
    model: PreTrainedModel,
    algorithm: AlgorithmConfig,
    packing: Packing = Packing.CHAIN,
    budget: int = 8192,
    checkpointing: bool = False,
    **training: Any,
) -> Learner:
    config = TrainingConfig(
        packing=packing, max_tokens_per_microbatch=budget, gradient_checkpointing=checkpointing, **training
    )
    return Learner(copy.deepcopy(model), config, algorithm, updates=10)


def earlier_policy(learner: Learner, batch: FlatBatch, seed: int) -> NDArray[np.float64]:
    """Log-probabilities [N] a little off, so that some ratios are clipped."""
    return full(learner.logprobs(batch)) + np.random.default_rng(seed).normal(0, 0.3, len(batch))


def scale(batch: FlatBatch, algorithm: AlgorithmConfig) -> float:
    """How large the gradient's terms are. Where they cancel, their rounding is all that is left."""
    size = np.abs(advantages(batch, algorithm)[batch.trajectory_id]) + algorithm.entropy_coef
    return float((token_weights(batch, algorithm) * size).sum())


def naive_loss(
    model: PreTrainedModel,
    groups: list[Group],
    algorithm: AlgorithmConfig,
    old: NDArray[np.float64] | None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss and its metrics token by token from the definitions: no flat arrays, no packing, stock attention."""
    trained = [
        (group, trajectory, step)
        for group in groups
        for trajectory in group.trajectories
        if trajectory.reward is not None
        for step in trajectory.steps
    ]
    tokens = sum(int(step.mask.sum()) for *_, step in trained)
    trajectories = len({t.trajectory_id for _, t, step in trained if step.mask.any()})
    steps = sum(bool(step.mask.any()) for *_, step in trained)
    if algorithm.length_norm is None:
        weight = 1 / max(tokens, 1)
    else:
        weight = 1 / (algorithm.length_norm * max(trajectories if algorithm.scope == "trajectory" else steps, 1))
    loss = torch.zeros((), dtype=torch.float64)
    metrics = {"entropy": 0.0, "clip_fraction": 0.0, "logprob_gap_mean": 0.0, "logprob_gap_max": 0.0}
    at = 0
    for group, trajectory, step in trained:
        rewards = [t.reward for t in group.trajectories if t.reward is not None]
        assert trajectory.reward is not None
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / max(len(rewards) - 1, 1))
        advantage = trajectory.reward - mean if max(rewards) > min(rewards) else 0.0
        if algorithm.norm_by_std:
            advantage /= std + 1e-6
        if not len(step.completion_ids):
            continue
        logp, entropy = step_logprobs(model, step)
        for number in range(len(step.completion_ids)):
            if step.mask[number]:
                ratio = (logp[number] - (logp[number].detach() if old is None else old[at])).exp()
                bounded = ratio.clamp(1 - algorithm.eps_low, 1 + algorithm.eps_high)
                policy = -torch.minimum(ratio * advantage, bounded * advantage)
                loss = loss + weight * (policy - algorithm.entropy_coef * entropy[number])
                anchor = float(logp[number].detach()) if old is None else float(old[at])
                gap = abs(anchor - float(step.logprobs[number]))
                cut = (advantage > 0 and ratio > 1 + algorithm.eps_high) or (
                    advantage < 0 and ratio < 1 - algorithm.eps_low
                )
                metrics["entropy"] += float(entropy[number].detach()) / tokens
                metrics["clip_fraction"] += float(cut) / tokens
                metrics["logprob_gap_mean"] += gap / tokens
                metrics["logprob_gap_max"] = max(metrics["logprob_gap_max"], gap)
            at += 1
    return loss, {**metrics, "loss": float(loss.detach()), "trainable_tokens": tokens}


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=list(ALGORITHMS))
@settings(max_examples=30, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking would take minutes
@given(groups=ragged_groups(), data=st.data())
def test_any_layout_gives_the_naive_loops_loss_gradient_and_metrics(
    algorithm: AlgorithmConfig, groups: list[Group], data: st.DataObject
) -> None:
    """Each step gets its trajectory's advantage under its own mask; packing, budget and checkpointing are cost only."""
    model = exact()
    batch = flatten(groups)
    packings = [Packing.CHAIN, Packing.STEP]
    learners = [
        make_learner(model, algorithm, packing, data.draw(st.integers(1, 100)), data.draw(st.booleans()))
        for packing in packings
    ]
    old = earlier_policy(learners[0], batch, len(batch)) if data.draw(st.booleans()) else None
    per_trajectory = advantages(batch, algorithm)
    loss, wanted = naive_loss(model, groups, algorithm, old)
    if loss.requires_grad:
        loss.backward()
    reference = gradients(model)
    limit = 1e-12 * max(norm(reference), 1e-2 * scale(batch, algorithm))
    for learner in learners:
        found = learner.accumulate(batch, per_trajectory, old)
        assert distance(gradients(learner.model), reference) <= limit
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=1e-11, abs=1e-11), name
        assert set(found) == {*wanted, *SAME_COST}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_of_models_gives_the_naive_gradient(family: str) -> None:
    """Sequences much longer than the sliding windows; chains and budgets that mix them."""
    algorithm = ALGORITHMS["per trajectory"]
    groups = random_groups(3, steps=4)
    model = exact(family)
    batch = flatten(groups)
    loss, _ = naive_loss(model, groups, algorithm, None)
    loss.backward()
    reference = gradients(model)
    assert norm(reference) > 1e-3
    for packing, budget in ((Packing.STEP, 60), (Packing.CHAIN, 60), (Packing.CHAIN, 8192)):
        learner = make_learner(model, algorithm, packing, budget)
        learner.accumulate(batch, advantages(batch, algorithm))
        assert distance(gradients(learner.model), reference) <= 1e-12 * norm(reference), (packing, budget)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("packing", list(Packing))
def test_logprobs_are_those_of_a_plain_forward_pass_of_each_step(family: str, packing: Packing) -> None:
    groups = random_groups(1, steps=4)
    model = exact(family)
    batch = flatten(groups)
    found = make_learner(model, AlgorithmConfig(), packing, 70).logprobs(batch)
    assert found.dtype == np.float64
    with torch.no_grad():
        wanted = np.concatenate([full(step_logprobs(model, step)[0]) for step in batch.steps])
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", SLIDING)
def test_the_sliding_window_matters_in_these_tests(family: str) -> None:
    """A guard for the tests above: on the same weights without windows the numbers are others."""
    groups = random_groups(1, steps=4)
    model = exact(family)
    wide = exact(family, sliding_window=200)
    assert distance(weights_of(model), weights_of(wide)) == 0
    near, far = (full(make_learner(m, AlgorithmConfig()).logprobs(flatten(groups))) for m in (model, wide))
    assert np.abs(near - far).max() > 1e-3


@pytest.mark.parametrize("budget", [1, 30, 8192])
def test_weights_agree_after_several_optimizer_steps(budget: int) -> None:
    """Others' implementations diverged only from the second step on."""
    optimizer = OptimizerConfig(learning_rate=3e-3, weight_decay=0.01, warmup=2)
    model = exact()
    batches = [random_groups(seed, groups=4, steps=3) for seed in range(3)]
    ends = []
    for packing, each in ((Packing.STEP, 8192), (Packing.CHAIN, budget)):
        learner = make_learner(
            model, ALGORITHMS["no std, entropy"], packing, each, optimizer=optimizer, updates_per_batch=2
        )
        results = [result for groups in batches for result in learner.train_batch(groups)]
        ends.append((weights_of(learner.model), results))
    (one, results), (other, others) = ends
    assert distance(one, weights_of(model)) > 1e-2 * norm(one)  # they went somewhere
    assert distance(one, other) <= 1e-9 * norm(one)
    for mine, theirs in zip(results, others, strict=True):
        assert mine.advantage == theirs.advantage
        for name in mine.metrics.keys() - set(SAME_COST):
            assert mine.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-8, abs=1e-10), name


def test_the_order_of_groups_does_not_change_the_gradient() -> None:
    groups = random_groups(0, groups=3)
    model = exact()
    found = []
    for order in (groups, groups[::-1]):
        learner = make_learner(model, ALGORITHMS["no std, entropy"], budget=50)
        batch = flatten(order)
        learner.accumulate(batch, advantages(batch, learner.algorithm))
        found.append(gradients(learner.model))
    assert distance(*found) <= 1e-12 * norm(found[0])


def test_a_chain_computes_less_and_trains_the_same_tokens() -> None:
    groups = random_groups(0, steps=5)
    batch = flatten(groups)
    metrics = {}
    for packing in Packing:
        learner = make_learner(exact(), AlgorithmConfig(), packing)
        metrics[packing] = learner.accumulate(batch, advantages(batch, learner.algorithm))
    assert metrics[Packing.CHAIN]["packed_sequences"] == 6 and metrics[Packing.STEP]["packed_sequences"] == 30
    assert metrics[Packing.CHAIN]["packed_tokens"] == sum(len(t.steps[-1].full_ids) for t in batch.trajectories)
    assert metrics[Packing.STEP]["packed_tokens"] == sum(len(step.full_ids) for step in batch.steps)
    assert metrics[Packing.CHAIN]["trainable_tokens"] == metrics[Packing.STEP]["trainable_tokens"] == len(batch)


def test_only_a_steps_own_mask_decides_about_its_tokens() -> None:
    """The last step's mask must not decide for the others: the same token is trained in one step, not in the next."""
    first = make_step([1, 2], [3, 4], mask=[True, False])
    second = make_step([1, 2, 3, 4, 5], [6, 7], mask=[False, True])
    groups = [make_group([([first, second], 1.0), ([make_step([1, 2], [9])], 0.0)])]
    model = exact()
    batch = flatten(groups)
    loss, metrics = naive_loss(model, groups, AlgorithmConfig(), None)
    assert metrics["trainable_tokens"] == 3
    loss.backward()
    learner = make_learner(model, AlgorithmConfig())
    learner.accumulate(batch, advantages(batch, AlgorithmConfig()))
    assert distance(gradients(learner.model), gradients(model)) <= 1e-12 * norm(gradients(model))
