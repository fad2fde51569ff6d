"""What the learner makes of the `algorithm` section: every combination trains, and only what is needed is computed."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.models import distance, exact, full, make_group, make_step, norm, random_groups, same_bits, tiny, weights_of
from tests.training.reference import ADVANTAGES, accumulated, earlier_policy, make_learner
from treadle.algorithms.config import AlgorithmConfig, CorrectionConfig, KlConfig, ValueConfig
from treadle.algorithms.estimators import Signals, advantages
from treadle.algorithms.kl import k1
from treadle.algorithms.losses import PolicyLoss
from treadle.core.errors import ConfigError, TrainingStopped
from treadle.core.files import Manifest
from treadle.core.registry import names
from treadle.packing.flat import flatten
from treadle.training.checkpoint import load_checkpoint, save_checkpoint
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.learner import Learner
from treadle.training.validation import check_algorithm

FAST = OptimizerConfig(learning_rate=1e-2)
TOKENIZER = Path(__file__).parents[2] / "src" / "treadle" / "recipes" / "tokenizer"


def learner_with(algorithm: AlgorithmConfig, reference: PreTrainedModel | None = None, **training: Any) -> Learner:
    return Learner(exact(), TrainingConfig(optimizer=FAST, **training), algorithm, 10, reference)


@pytest.mark.quick(12)
@pytest.mark.parametrize("loss", names("policy_losses"))
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_advantage_trains_with_every_policy_loss(advantage: str, loss: str) -> None:
    """Two updates, the second one away from its anchor: what was rewarded becomes more probable."""
    good, bad = make_step([1, 2], [3, 4], logprobs=[-3, -3]), make_step([1, 2], [5, 6], logprobs=[-3, -3])
    groups = [make_group([([good], 1.0), ([bad], 0.0)], index) for index in range(2)]
    algorithm = AlgorithmConfig(advantage=advantage, policy_loss=loss)
    learner = learner_with(algorithm, updates_per_batch=2)
    before = full(learner.logprobs(flatten(groups[:1])))
    results = learner.train_batch(groups)
    after = full(learner.logprobs(flatten(groups[:1])))
    assert after[:2].sum() - after[2:].sum() > before[:2].sum() - before[2:].sum() + 0.1
    assert all(np.isfinite(list(result.metrics.values())).all() for result in results)
    assert [result.advantage["g000000.0" if i == 0 else "g000001.0"] > 0 for i, result in enumerate(results)] == [1, 1]


def test_the_advantage_of_a_trajectory_is_told_as_the_mean_over_its_trained_tokens() -> None:
    """Nothing is told of a trajectory without any: it has no advantage, not one of 0."""
    steps = [make_step([1], [2, 3]), make_step([1], [4])]
    rewarded = [replace(step, reward=reward) for step, reward in zip(steps, (1.0, 0.5), strict=True)]
    greedy = make_step([1], [2], 0.0)
    groups = [make_group([(rewarded, 1.5), (steps, 0.0), ([greedy], 0.0), ([], 0.0)])]
    learner = learner_with(AlgorithmConfig(advantage="step_return"))
    per_token = advantages(flatten(groups), learner.algorithm)
    (result,) = learner.train_batch(groups)
    assert set(result.advantage) == {"g000000.0", "g000000.1"}
    assert result.advantage["g000000.0"] == pytest.approx(per_token[:3].mean())
    assert len(set(per_token[:3].tolist())) == 2


def test_a_correction_weighs_what_is_trained() -> None:
    """A trajectory left out whole trains nothing; renormalised, the rest weighs as if it had never been there."""
    groups, model = random_groups(0, groups=1, size=2), exact()
    batch = flatten(groups)
    old = earlier_policy(model, groups)
    recorded = [
        replace(s, logprobs=(old[a:b] - (3.0 if t else 0.0)).clip(max=0).astype(np.float32))
        for s, t, a, b in zip(
            batch.steps, batch.trajectory_of_step, batch.step_start, batch.step_start[1:], strict=False
        )
    ]
    off = [make_group([(recorded[:3], 0.0), (recorded[3:], 1.0)])]
    advantage = advantages(batch, AlgorithmConfig())
    kept = batch.trajectory_id == 0
    alone = make_learner(model)
    alone.accumulate(flatten([make_group([(recorded[:3], 0.0)])]), advantage[kept], old[kept])
    wanted = {name: p.grad.clone() for name, p in alone.model.named_parameters() if p.grad is not None}
    share = kept.mean()
    for renormalize in (True, False):
        correction = CorrectionConfig(geometric_mask=(0.9, 1.1), renormalize=renormalize)
        found, metrics = accumulated(make_learner(model, AlgorithmConfig(correction=correction)), off, old)
        expected = {name: value * (1.0 if renormalize else share) for name, value in wanted.items()}
        assert distance(found, expected) <= 1e-12 * norm(wanted)
        assert metrics["correction_masked_fraction"] == pytest.approx(1 - share)
        assert metrics["correction_weight_mean"] == 1


@pytest.mark.parametrize("loss", names("policy_losses"))
def test_an_untrained_token_may_be_as_improbable_as_it_likes(loss: str) -> None:
    """In float32 its ratio would be infinite, and no weight of 0 makes that a number again."""
    recorded = make_step([1, 2], [3, 4, 5], mask=[True, False, True], logprobs=[-3, -500, -3])
    groups = [make_group([([recorded], 1.0), ([make_step([1, 2], [6], logprobs=[-3])], 0.0)])]
    algorithm = AlgorithmConfig(
        policy_loss=loss, kl=KlConfig(coef=0.1), correction=CorrectionConfig(geometric_mask=(0.0, 1e3))
    )
    batch = flatten(groups)
    masked = np.where(batch.mask, -3.0, -500.0)
    learner = make_learner(tiny(), algorithm)
    for old in (None, masked):
        _, metrics = accumulated(learner, groups, old, masked)
        assert all(np.isfinite(value) for value in metrics.values())
        assert all(p.grad is None or p.grad.isfinite().all() for p in learner.model.parameters())


# KL


def test_kl_in_the_loss_holds_the_policy_near_its_reference() -> None:
    """Without any advantage, KL is all there is: it falls."""
    groups = random_groups(0, rewards=(1.0,))
    learner = learner_with(AlgorithmConfig(kl=KlConfig(coef=1.0)), reference=exact(seed=5))
    kls = [learner.train_batch(groups)[0].metrics["kl"] for _ in range(6)]
    assert kls[-1] < 0.8 * kls[0]
    assert learner.train_batch(groups)[0].metrics["kl_coef"] == 1.0


def test_kl_in_the_reward_is_a_penalty_of_each_token() -> None:
    groups = random_groups(0)
    batch = flatten(groups)
    reference = full(make_learner(exact(seed=5)).logprobs(batch))
    algorithm = AlgorithmConfig(advantage="reinforce++", kl=KlConfig(coef=0.3, estimator="k1", where="reward"))
    learner, other = (
        learner_with(algorithm, reference=exact(seed=5)),
        learner_with(AlgorithmConfig(advantage="reinforce++")),
    )
    old = full(learner.logprobs(batch))
    penalty = 0.3 * k1(torch.from_numpy(old), torch.from_numpy(reference)).numpy()
    (result,) = learner.train_batch(groups)
    other.accumulate(batch, advantages(batch, algorithm, Signals(penalty)), old)
    total = float(torch.cat([p.grad.flatten() for p in other.model.parameters() if p.grad is not None]).norm())
    assert result.metrics["gradient_norm"] == pytest.approx(total, rel=1e-9)
    assert result.metrics["kl"] == pytest.approx(float((old - reference).mean()), rel=1e-9)


def test_an_adaptive_coefficient_moves_and_is_in_the_checkpoint(tmp_path: Path) -> None:
    groups = random_groups(0)
    algorithm = AlgorithmConfig(kl=KlConfig(coef=0.1, target=1e-3, horizon=6.0))

    fresh = partial(make_learner, tiny(), algorithm, reference=tiny(seed=5), optimizer=FAST)
    learner = fresh()
    coefs = [learner.train_batch(groups)[0].metrics["kl_coef"] for _ in range(3)]
    assert coefs == pytest.approx([0.1, 0.1 * 1.2, 0.1 * 1.2**2])  # 6 trajectories an update
    save_checkpoint(tmp_path / "step", learner, TOKENIZER)
    other = fresh()
    load_checkpoint(Manifest.load(tmp_path / "step"), other, TOKENIZER)
    assert other.kl == learner.kl
    for one in (learner, other):
        one.train_batch(groups)
    assert same_bits(weights_of(learner.model), weights_of(other.model))


# What is refused


@pytest.mark.parametrize(
    ("algorithm", "training", "reason"),
    [
        (AlgorithmConfig(value=ValueConfig(clip=0.2)), {}, "'grpo' needs no value head"),
        (AlgorithmConfig(kl=KlConfig(coef=0.1, estimator="k1")), {}, "the gradient of k1 as a loss is 0"),
        (AlgorithmConfig(), {"group_size": 1}, "training.group_size is 1, but algorithm.advantage 'grpo' compares"),
        (AlgorithmConfig(advantage_options={"gamma": 0.5}), {}, "algorithm.advantage_options: unknown key 'gamma'"),
    ],
    ids=["value", "kl", "group of one", "validation"],
)
def test_what_cannot_work_is_refused_before_there_is_a_model(
    algorithm: AlgorithmConfig, training: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_algorithm(algorithm, TrainingConfig(**training))
    with pytest.raises(ConfigError, match=reason):
        learner_with(algorithm, **training)


# Functions of users that give something else


def scalar(logp: torch.Tensor, tokens: Any, options: Any) -> torch.Tensor:
    return torch.as_tensor(-(logp * tokens.advantage).mean())


def not_a_number(logp: torch.Tensor, tokens: Any, options: Any) -> torch.Tensor:
    return logp * math.nan


SCALAR, NOT_A_NUMBER = PolicyLoss(scalar), PolicyLoss(not_a_number)


@pytest.mark.parametrize(
    ("loss", "error", "said"),
    [
        (
            "SCALAR",
            ConfigError,
            r"SCALAR' returned one of shape \[\]; it must return the loss of each token, a tensor of shape",
        ),
        (
            "NOT_A_NUMBER",
            TrainingStopped,
            "NOT_A_NUMBER' gave the loss nan in update 1, though all log-probabilities are",
        ),
    ],
)
def test_a_loss_that_is_none_is_named_at_the_first_update(loss: str, error: type[Exception], said: str) -> None:
    learner = learner_with(AlgorithmConfig(policy_loss=f"tests.training.test_algorithms:{loss}"))
    before = weights_of(learner.model)
    with pytest.raises(error, match=said):
        learner.train_batch(random_groups(0))
    assert distance(before, weights_of(learner.model)) == 0


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (lambda tokens: np.zeros(3), r"gave an array of shape \(3,\); it must give one number for each of the"),
        (lambda tokens: np.full(tokens, np.nan), "gave nan for token .*; it must be finite"),
    ],
)
def test_an_advantage_that_is_none_is_named_at_the_first_update(gives: Any, said: str) -> None:
    learner = learner_with(AlgorithmConfig())
    learner.advantage = replace(learner.advantage, per_token=lambda batch, signals, options: gives(len(batch.mask)))
    with pytest.raises(ConfigError, match=f"algorithm.advantage: 'grpo' {said}"):
        learner.train_batch(random_groups(0))
