"""What the learner makes of the `algorithm` section: every combination trains, only what is needed is computed."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.models import distance, exact, full, make_group, make_step, norm, random_groups, same_bits, tiny, weights_of
from tests.training.reference import (
    ADVANTAGES,
    LAYOUTS,
    accumulated,
    drawn_head,
    earlier_policy,
    forked_groups,
    make_learner,
    step_values,
)
from treadle.algorithms.config import AlgorithmConfig, CorrectionConfig, KlConfig, ValueConfig
from treadle.algorithms.estimators import Signals, advantages
from treadle.algorithms.kl import k1
from treadle.core.errors import ConfigError
from treadle.core.files import Manifest
from treadle.core.registry import names
from treadle.core.types import Group
from treadle.models.weights import published
from treadle.packing.flat import flatten
from treadle.training.checkpoint import load_checkpoint, save_checkpoint
from treadle.training.config import OptimizerConfig, TrainingConfig, check_algorithm
from treadle.training.frozen import make_reference
from treadle.training.learner import Learner

FAST = OptimizerConfig(learning_rate=1e-2)
TOKENIZER = Path(__file__).parents[2] / "src" / "treadle" / "recipes" / "tokenizer"


def learner_with(algorithm: AlgorithmConfig, reference: PreTrainedModel | None = None, **training: Any) -> Learner:
    model, training_config = exact(), TrainingConfig(optimizer=FAST, **training)
    return Learner(model, training_config, algorithm, 10, reference=make_reference(algorithm.kl, model, reference))


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


GAE = AlgorithmConfig(advantage="gae", advantage_options={"gamma": 0.9, "gae_lambda": 0.8})


def learner_of(seed: int = 0, algorithm: AlgorithmConfig = GAE, **training: Any) -> Learner:
    return Learner(tiny(seed=seed), TrainingConfig(optimizer=FAST, **training), algorithm, 10)


@pytest.mark.quick(5)
@pytest.mark.parametrize("budget", [1, 7, 8192])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_the_value_of_a_token_is_that_of_the_state_in_which_it_was_sampled(layout: dict[str, Any], budget: int) -> None:
    model, batch = exact(), flatten(forked_groups(groups=1))
    found = make_learner(model, GAE, max_tokens_per_microbatch=budget, **layout).scores(batch).value
    with torch.no_grad():
        wanted = torch.cat([step_values(model, drawn_head(model), step) for step in batch.steps])
    assert found is not None and not found.requires_grad
    np.testing.assert_allclose(full(found), full(wanted), rtol=1e-12, atol=1e-12)
    assert float(wanted.std()) > 0.1


def test_values_are_0_at_first_and_nothing_is_drawn_for_them() -> None:
    model = tiny()
    state = torch.get_rng_state()
    learner = Learner(model, TrainingConfig(), GAE, 1)
    assert torch.equal(state, torch.get_rng_state())
    scores = learner.scores(flatten(random_groups(0)))
    assert scores.value is not None and not scores.value.any()


def foretold() -> list[Group]:
    """Two tasks: one always pays, the other never does, and their openings tell which."""
    return [
        make_group([([make_step([1 + index], [3 + i, 4 + i])], float(index)) for i in range(3)], index)
        for index in range(2)
    ]


def test_it_learns_returns_that_can_be_foretold_and_then_there_is_no_advantage_left() -> None:
    learner = Learner(tiny(), TrainingConfig(optimizer=FAST), AlgorithmConfig(advantage="gae"), 30)
    first, *_, last = [learner.train_batch(foretold())[0] for _ in range(30)]
    assert first.metrics["value_loss"] == pytest.approx(0.25)  # of V = 0: half of the tokens return 1
    assert first.metrics["value_explained_variance"] == 0
    assert last.metrics["value_loss"] < 0.01 and last.metrics["value_explained_variance"] > 0.95
    assert first.advantage["g000001.0"] == 1 and abs(last.advantage["g000001.0"]) < 0.2


def test_old_values_are_of_the_start_of_the_batch() -> None:
    """For all of its updates: the second one learns the returns that were fixed before the first."""
    groups = random_groups(0, groups=4)
    algorithm = AlgorithmConfig(advantage="gae", value=ValueConfig(clip=1e-4))
    learner, by_hand = (learner_of(algorithm=algorithm, updates_per_batch=2) for _ in range(2))
    first, second = flatten(groups[:2]), flatten(groups[2:])
    starts = by_hand.scores(first), by_hand.scores(second)
    results = learner.train_batch(groups)
    assert [by_hand.update(batch, start) for batch, start in zip((first, second), starts, strict=True)] == results
    assert same_bits(weights_of(learner.trained), weights_of(by_hand.trained))
    assert results[0].metrics["value_clip_fraction"] == 0 < results[1].metrics["value_clip_fraction"]


def test_there_is_none_unless_an_advantage_needs_it_and_it_is_never_published() -> None:
    plain = learner_of(algorithm=AlgorithmConfig())
    assert plain.value_head is None and plain.trained is plain.model
    assert dict(published(learner_of().model)).keys() == dict(published(plain.model)).keys()
