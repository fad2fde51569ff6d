"""What an update does and does not do, beyond its gradient."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.models import (
    distance,
    each_step,
    exact,
    full,
    gradients,
    make_group,
    make_step,
    norm,
    random_groups,
    same_bits,
    step_logprobs,
    tiny,
    weights_of,
)
from tests.training import reference
from tests.training.reference import forked_groups
from treadle.algorithms.config import AlgorithmConfig, KlConfig
from treadle.algorithms.estimators import advantages
from treadle.core.errors import ConfigError, TrainingStopped
from treadle.core.registry import names
from treadle.core.types import Group, SamplingParams, Step
from treadle.models.loading import load_frozen
from treadle.packing.flat import flatten
from treadle.training.checkpoint import export_model
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.frozen import make_reference
from treadle.training.learner import Learner
from treadle.training.optimizer import learning_rate, make_optimizer, step

FAST = OptimizerConfig(learning_rate=1e-2)


make_learner = partial(reference.make_learner, optimizer=FAST)


def test_the_first_update_is_adamw_on_the_accumulated_gradient() -> None:
    """With the gradient clipped, the rate of the schedule, and a fresh gradient for the next update."""
    groups = random_groups(0)
    optimizer = OptimizerConfig(learning_rate=1e-2, max_grad_norm=0.01, warmup=4, weight_decay=0.1)
    learner = make_learner(exact(), optimizer=optimizer)
    batch = flatten(groups)
    learner.accumulate(batch, advantages(batch, learner.algorithm))
    gradient, start = gradients(learner.model), weights_of(learner.model)
    learner.optimizer.zero_grad()
    (result,) = learner.train_batch(groups)
    size = norm(gradient)
    assert result.metrics["gradient_norm"] == pytest.approx(size, rel=1e-9)
    assert result.metrics["learning_rate"] == pytest.approx(2.5e-3)
    moved = {}
    for name, old in start.items():
        clipped = gradient[name] * (0.01 / (size + 1e-6))
        moved[name] = old * (1 - 2.5e-3 * 0.1) - 2.5e-3 * clipped / (clipped.abs() + 1e-8)
    assert distance(moved, weights_of(learner.model)) < 1e-9 * distance(moved, start)
    assert norm(gradients(learner.model)) == 0
    assert learner.updates_done == 1


def test_a_batch_without_any_advantage_changes_nothing() -> None:
    groups = random_groups(0, rewards=(0.7,))
    learner = make_learner(tiny())
    before = weights_of(learner.model)
    (result,) = learner.train_batch(groups)
    assert same_bits(before, weights_of(learner.model))
    assert result.metrics["gradient_norm"] == 0 and result.metrics["loss"] == 0
    assert set(result.advantage.values()) == {0.0}


@pytest.mark.parametrize(
    "groups",
    [
        [make_group([])],
        [make_group([([], 1.0), ([], 0.0)])],
        [make_group([([make_step([1], [2])], None)])],
        [make_group([([make_step([1], [2], mask=[False])], 1.0), ([make_step([1], [3], 0.0)], 0.0)])],
        [make_group([([make_step([1], [])], 1.0), ([], 0.0)])],
    ],
    ids=["nobody", "no steps", "failed", "masked and greedy", "empty completion"],
)
def test_a_batch_without_a_trainable_token_changes_nothing_later_either(groups: list[Group]) -> None:
    """Not the weights though there is momentum and decay, not the moments, and no gradient is left over."""
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    algorithm = AlgorithmConfig(entropy_coef=(0.1, 0.1))
    learner, other = (make_learner(tiny(), algorithm, optimizer=optimizer) for _ in range(2))
    for one in (learner, other):
        one.train_batch(random_groups(0))
    before = weights_of(learner.model)
    (result,) = learner.train_batch(groups)
    assert same_bits(before, weights_of(learner.model))
    assert result.metrics["trainable_tokens"] == 0 and result.metrics["gradient_norm"] == 0
    assert all(math.isfinite(value) for value in result.metrics.values() if value is not None)
    assert {result.metrics[name] for name in ("entropy", "ratio_max", "clip_fraction", "zero_advantage_groups")} == {
        None
    }
    assert learner.updates_done == 2
    other.updates_done = 2
    for one in (learner, other):
        one.train_batch(random_groups(1))
    assert same_bits(weights_of(learner.model), weights_of(other.model))


def test_a_later_update_of_a_batch_is_anchored_before_the_first() -> None:
    """With updates_per_batch > 1 the ratio of the second update is not 1, and may be clipped."""
    groups = random_groups(0, groups=4)
    learner = make_learner(exact(), updates_per_batch=2, optimizer=OptimizerConfig(learning_rate=0.1))
    first, second = flatten(groups[:2]), flatten(groups[2:])
    old = learner.scores(second)
    results = learner.train_batch(groups)
    assert len(results) == 2 and learner.updates_done == 2
    assert results[0].metrics["clip_fraction"] == 0 < results[1].metrics["clip_fraction"] <= 1
    assert set(results[0].advantage) == {t.trajectory_id for t in first.trajectories}
    assert set(results[1].advantage) == {t.trajectory_id for t in second.trajectories}
    by_hand = make_learner(exact(), updates_per_batch=2, optimizer=OptimizerConfig(learning_rate=0.1))
    by_hand.update(first)
    assert by_hand.update(second, old).metrics == pytest.approx(results[1].metrics, rel=1e-9)
    assert by_hand.logprobs(second) == pytest.approx(learner.logprobs(second))


@pytest.mark.parametrize("per_batch", [1, 2, 4])
def test_an_update_is_of_whole_groups_however_many_steps_they_have(per_batch: int) -> None:
    """By rows there would be more updates the more steps there are, and rows that do not divide."""
    whole = random_groups(0, groups=4, steps=7)
    lengths = iter([1, 7, 2, 5, 1, 1, 3, 7, 7, 2, 4, 6])
    groups = [
        replace(group, trajectories=tuple(replace(t, steps=t.steps[: next(lengths)]) for t in group.trajectories))
        for group in whole
    ]
    learner = make_learner(tiny(), updates_per_batch=per_batch)
    results = learner.train_batch(groups)
    assert len(results) == per_batch == learner.updates_done
    ids = [t.trajectory_id for group in groups for t in group.trajectories]
    size = len(ids) // per_batch
    assert [list(result.advantage) for result in results] == [ids[n * size : (n + 1) * size] for n in range(per_batch)]
    sampled = sum(len(step.completion_ids) for group in groups for t in group.trajectories for step in t.steps)
    assert sum(result.metrics["trainable_tokens"] for result in results) == sampled


@pytest.mark.quick(3)
@pytest.mark.parametrize("per_batch", [1, 2])
@pytest.mark.parametrize(
    "fields", [{}, {"advantage": "gae"}, {"policy_loss": "gspo"}, {"policy_loss": "reinforce"}], ids=str
)
def test_epochs_go_through_a_batch_again_with_what_was_known_at_its_start(
    fields: dict[str, Any], per_batch: int
) -> None:
    groups, algorithm = random_groups(0, groups=2), AlgorithmConfig(**fields)
    learner = make_learner(exact(), algorithm, updates_per_batch=per_batch, epochs_per_batch=3)
    by_hand = make_learner(exact(), algorithm, updates_per_batch=per_batch, epochs_per_batch=3)
    batches = [flatten(groups)] if per_batch == 1 else [flatten(groups[:1]), flatten(groups[1:])]
    starts = [by_hand.scores(batch) for batch in batches]
    known = algorithm.policy_loss != "reinforce"
    wanted = [
        by_hand.update(batch, start if known else None)
        for _ in range(3)
        for batch, start in zip(batches, starts, strict=True)
    ]
    assert learner.train_batch(groups) == wanted and len(wanted) == 3 * per_batch == learner.updates_done
    assert same_bits(weights_of(learner.trained), weights_of(by_hand.trained))
    if known:  # the last epoch is away from its anchor
        assert wanted[-1].metrics["clip_fraction"] > 0


def test_refusals_are_told_in_every_epoch() -> None:
    sound = ([make_step([1], [2])], 0.0)
    spoilt = make_group([([make_step([1], [])], 1.0), sound, sound])
    results = make_learner(tiny(), epochs_per_batch=2).train_batch([spoilt])
    assert [set(result.refused) for result in results] == [{"g000000.0"}] * 2


def test_a_group_that_is_too_small_after_refusals_trains_nothing() -> None:
    spoilt = make_group([([make_step([1], [])], 1.0), ([make_step([1], [2])], 0.0)])
    [result] = make_learner(tiny()).train_batch([spoilt])
    assert set(result.refused) == {"g000000.0", "g000000.1"}
    [result] = make_learner(tiny(), min_group_size=1).train_batch([spoilt])
    assert set(result.refused) == {"g000000.0"}


def test_the_only_update_of_a_batch_is_its_own_anchor() -> None:
    groups = random_groups(0)
    learner, other = make_learner(exact()), make_learner(exact())
    batch = flatten(groups)
    (result,) = learner.train_batch(groups)
    explicit = other.update(batch, other.scores(batch))
    assert result.metrics == pytest.approx(explicit.metrics)
    assert result.metrics["clip_fraction"] == 0
    assert distance(weights_of(learner.model), weights_of(other.model)) < 1e-9


def recorded_by(model: PreTrainedModel, groups: list[Group]) -> list[Group]:
    """The groups as an engine with the learner's weights would have recorded them."""

    def exactly(step: Step) -> Step:
        with torch.no_grad():
            return replace(step, logprobs=full(step_logprobs(model, step)[0]).astype(np.float32))

    return each_step(exactly, groups)


COMPARED = ("ratio_mean", "ratio_max", "ratio_min", "logprob_gap_mean", "logprob_gap_max", "logprob_gap_kl")


@pytest.mark.quick(4)
@pytest.mark.parametrize("loss", names("policy_losses"))
@pytest.mark.parametrize("more", [{"updates_per_batch": 2}, {"epochs_per_batch": 2}], ids=str)
def test_what_the_start_of_a_batch_would_be_needed_for_is_absent_where_it_is_not_known(
    loss: str, more: dict[str, Any]
) -> None:
    """Engine and learner agree; the second update is far from the batch's start, and says so or nothing."""
    model = exact()
    groups = recorded_by(model, random_groups(0, groups=2, rewards=(0.0, 1.0)))
    learner = make_learner(
        model, AlgorithmConfig(policy_loss=loss), **more, optimizer=OptimizerConfig(learning_rate=0.1)
    )
    known = learner.policy_loss.anchor == "old"
    first, second = (result.metrics for result in learner.train_batch(groups))
    assert (first["ratio_max"], first["ratio_min"]) == (1, 1) and first["logprob_gap_max"] < 1e-5
    assert {name for name in COMPARED if name in second} == (set(COMPARED) if known else set())
    if known:
        assert second["ratio_max"] > 1.1 and second["logprob_gap_max"] < 1e-5
    third = learner.train_batch(groups)[0].metrics  # a new batch, one version later
    assert third["ratio_max"] == 1 and third["logprob_gap_lag_1"] > 0.1


def test_there_is_no_gap_between_different_distributions() -> None:
    """The engine's log-probability under top-p is of what that leaves, the learner's of everything."""
    model = exact()
    plain = make_step([1, 2], [3, 4])
    [group] = recorded_by(model, [make_group([([plain], 1.0)])])
    [plain] = group.trajectories[0].steps
    for fields in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}):
        truncated = replace(plain, sampling=SamplingParams(**fields), logprobs=plain.logprobs / np.float32(3))
        (result,) = make_learner(model).train_batch([make_group([([plain, truncated], 1.0)])])
        assert result.metrics["logprob_gap_max"] < 1e-5 and result.metrics["trainable_tokens"] == 4
        (result,) = make_learner(model).train_batch([make_group([([truncated], 1.0)])])
        assert [name for name in result.metrics if name.startswith("logprob_gap")] == []
        assert result.metrics["ratio_mean"] == 1


def test_the_entropy_bonus_goes_linearly_from_start_to_end_and_raises_entropy() -> None:
    groups = random_groups(0, rewards=(1.0,))  # no advantage: the bonus is all there is
    learner = make_learner(exact(), AlgorithmConfig(entropy_coef=0.4), updates=4)
    results = [learner.train_batch(groups)[0].metrics for _ in range(5)]
    shares = [-result["loss"] / result["entropy"] for result in results]
    assert shares == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert results[4]["entropy"] > results[0]["entropy"] + 0.05


def test_bfloat16_stays_near_float32() -> None:
    groups = random_groups(0, groups=3)
    model = tiny()
    batch = flatten(groups)
    found = {}
    for precision in ("float32", "bfloat16"):
        learner = make_learner(model, precision=precision)
        logp = learner.logprobs(batch)
        assert logp.dtype == np.float32
        learner.accumulate(batch, advantages(batch, learner.algorithm))
        found[precision] = (logp, gradients(learner.model))
        learner.train_batch(groups)
        assert {p.dtype for p in learner.model.parameters()} == {torch.float32}
    (exact_logp, exact_gradient), (logp, gradient) = found.values()
    assert 0 < np.abs(logp - exact_logp).max() < 0.2
    assert 0 < distance(gradient, exact_gradient) < 0.1 * norm(exact_gradient)


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1, 1]),
        ({"warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ({"decay_from": 0.5}, [1, 1, 1, 1, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2]),
        ({"decay_from": 0.5, "final_lr": 0.5}, [1, 1, 1, 1, 1, None, 0.75, None]),
        ({"warmup": 2, "decay_from": 0.0, "final_lr": 1.0}, [0.5, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_learning_rates_course(fields: dict[str, Any], shares: list[float | None]) -> None:
    config = OptimizerConfig(learning_rate=2.0, **fields)
    found = [learning_rate(config, update, 8) for update in range(8)]
    assert learning_rate(config, 8, 8) == learning_rate(config, 11, 8)  # past the planned end, too
    for rate, share in zip(found, shares, strict=True):
        assert share is None or rate == pytest.approx(2.0 * share)


def test_between_sampling_and_training_versions_count_not_updates() -> None:
    learner, groups = make_learner(exact(), updates_per_batch=2), random_groups(0, groups=2)
    learner.train_batch(groups)
    for result in learner.train_batch(groups):  # sampled by version 0, trained by version 1
        assert [name for name in result.metrics if "_lag_" in name] == ["logprob_gap_lag_1"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_the_weights(value: float) -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    config = OptimizerConfig(learning_rate=0.1)
    optimizer = make_optimizer(model, config)
    (model(torch.ones(1, 2)) * value).sum().backward()
    with pytest.raises(TrainingStopped, match=r"norm is (nan|inf) at learning rate 0.1; the weights were not changed"):
        step(optimizer, model, config, 0.1)
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    (model(torch.ones(1, 2))).sum().backward()
    assert step(optimizer, model, config, 0.1) == pytest.approx(3**0.5)
    assert not torch.equal(model.weight, before)


TOKENIZER = Path(__file__).parents[2] / "src" / "treadle" / "recipes" / "tokenizer"


def learner_of(seed: int = 0, reference_seed: int | None = None, precise: bool = False, **kl: Any) -> Learner:
    make, algorithm = exact if precise else tiny, AlgorithmConfig(kl=KlConfig(coef=0.3, **kl))
    model = make(seed=seed)
    reference = make_reference(algorithm.kl, model, None if reference_seed is None else make(seed=reference_seed))
    return Learner(model, TrainingConfig(optimizer=FAST), algorithm, 10, reference=reference)


def reference_weights(learner: Learner) -> dict[str, torch.Tensor]:
    assert learner.reference is not None
    return weights_of(learner.reference.forward.model)


def kls(learner: Learner, updates: int) -> list[float]:
    return [learner.train_batch(random_groups(seed))[0].metrics["kl"] for seed in range(updates)]


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_it_is_the_policy_before_the_first_update_and_stays_so(where: Any) -> None:
    learner = learner_of(precise=True, where=where)
    start = weights_of(learner.model)
    first, *later = kls(learner, 3)
    assert abs(first) < 1e-20 and min(later) > 1e-4
    assert same_bits(start, reference_weights(learner))
    assert not same_bits(start, weights_of(learner.model))


def test_it_may_become_the_policy_from_time_to_time() -> None:
    learner = learner_of(precise=True, reset_every=2)
    found = kls(learner, 6)
    assert max(found[::2]) < 1e-20 and min(found[1::2]) > 1e-4  # updates 1, 3, 5 begin at a fresh reference
    assert same_bits(weights_of(learner.model), reference_weights(learner))


def test_kl_compares_with_the_reference_at_each_tokens_recorded_temperature() -> None:
    batch = flatten(forked_groups(groups=1))
    learner = learner_of(precise=True, reference_seed=5)
    policy, reference = (full(make_learner(exact(seed=seed)).logprobs(batch)) for seed in (0, 5))
    d = (policy - reference)[batch.mask]
    assert learner.update(batch).metrics["kl"] == pytest.approx(float((np.exp(-d) - 1 + d).mean()), rel=1e-9)


def test_another_model_cannot_become_the_policy() -> None:
    with pytest.raises(ConfigError, match=r"kl\.reset_every is 2, but algorithm\.kl\.model has other weights"):
        make_reference(KlConfig(coef=0.3, reset_every=2), tiny(), tiny(num_hidden_layers=1))


def test_a_reference_is_loaded_from_a_directory_and_must_cover_the_policy(tmp_path: Path) -> None:
    model = tiny(seed=5)
    export_model(tmp_path / "model", model, TOKENIZER)
    path = str(tmp_path / "model")
    assert same_bits(weights_of(load_frozen(path, "algorithm.kl.model", tiny())), weights_of(model))
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.model: vocab_size of .* is 32, smaller than the model's 40"):
        load_frozen(path, "algorithm.kl.model", tiny(vocab_size=40))
    with pytest.raises(ConfigError, match=r"max_position_embeddings of .* is 256, smaller than the model's 300"):
        load_frozen(path, "algorithm.kl.model", tiny(max_position_embeddings=300))
    with pytest.raises(ConfigError, match=r"algorithm\.kl\.model: no config\.json in"):
        load_frozen(str(tmp_path), "algorithm.kl.model", tiny())
