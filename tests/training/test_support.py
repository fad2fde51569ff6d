"""Where filters left tokens out, all models score over what was left: exactly, in every packing."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.kit import random_scripts, recorded
from tests.engines.test_sampling import slow_filters
from tests.models import (
    VOCABULARY,
    distance,
    each_step,
    exact,
    full,
    gradients,
    make_group,
    norm,
    step_logprobs,
    weights_of,
)
from tests.training.reference import (
    LAYOUTS,
    accumulated,
    cut,
    forked_groups,
    learner_gradients,
    make_learner,
    separate,
    separate_gradient,
    step_distributions,
    taught_advantages,
    updated_by_hand,
)
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig, KlConfig
from treadle.algorithms.reductions import token_weights
from treadle.core.support import Support
from treadle.core.types import Step, group_id, trajectory_id
from treadle.packing.flat import flatten
from treadle.record.rollout_store import read_shard, write_shard
from treadle.training import lm_head
from treadle.training.config import OptimizerConfig

GROUPS = cut(forked_groups(groups=2))
ALGORITHM = AlgorithmConfig(entropy_coef=0.01)
BUDGETS = [("step", 8192), ("chain", 60), ("tree within group", 8192), ("tree within batch", 9)]


@pytest.mark.parametrize("few", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("layout", "budget"), BUDGETS)
def test_gradients_are_those_of_each_step_with_masked_logits(
    layout: str, budget: int, few: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few: the share of the vocabulary up to which single logits are computed."""
    monkeypatch.setattr(lm_head, "FEW", few)
    model = exact()
    wanted, metrics = separate_gradient(model, GROUPS, ALGORITHM)
    learner = make_learner(model, ALGORITHM, max_tokens_per_microbatch=budget, **LAYOUTS[layout])
    found, measured = accumulated(learner, GROUPS)
    assert distance(found, wanted) <= 1e-12 * norm(wanted)
    for name in ("loss", "entropy"):
        assert measured[name] == pytest.approx(metrics[name], rel=1e-11)
    unmasked, _ = separate_gradient(model, forked_groups(groups=2), ALGORITHM)
    assert distance(unmasked, wanted) > 1e-3 * norm(wanted)


@pytest.mark.parametrize("few", [0.0, 1.0])
def test_small_chunks_change_nothing(few: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "FEW", few)
    model = exact()
    wanted, _ = separate_gradient(model, GROUPS, ALGORITHM)
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 5000)  # less than ten rows of logits, or of embeddings
    found, _ = accumulated(make_learner(model, ALGORITHM, **LAYOUTS["tree within batch"]), GROUPS)
    assert distance(found, wanted) <= 1e-12 * norm(wanted)


def test_a_reference_scores_over_the_same_ids() -> None:
    model, other, batch = exact(), exact(seed=5), flatten(GROUPS)
    learner = make_learner(model, AlgorithmConfig(kl=KlConfig(coef=0.1)), reference=other)
    assert learner.reference is not None
    found = learner.frozen_scores(learner.reference, batch).logp.numpy()
    wanted = np.concatenate([step_logprobs(other, step)[0].detach().numpy() for step in batch.steps])
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)
    only = batch.support is not None and (batch.support.counts == 1)
    assert np.abs(found[only]).max() <= 1e-12  # what is forced is certain, and has no gradient


def test_every_id_in_the_support_is_no_cut() -> None:
    def full(step: Step) -> Step:
        return replace(step, support=Support.of([range(VOCABULARY)] * len(step.completion_ids)))

    plain: Any = forked_groups(groups=1)
    groups = each_step(full, plain)
    learner = make_learner(exact(), ALGORITHM)
    found, wanted = (learner.logprobs(flatten(each)) for each in (groups, plain))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("form", ["reverse_top_k", "forward_top_k"])
def test_a_teachers_most_probable_tokens_are_of_the_support(form: Any) -> None:
    model, teacher, batch = exact(), exact(seed=5), flatten(GROUPS)
    section = DistillationConfig(teacher="T", coef=0.5, form=form, top_k=VOCABULARY, rewards=0.0)
    algorithm = AlgorithmConfig(distillation=section)
    learner = make_learner(model, algorithm, teacher=teacher, max_tokens_per_microbatch=9)
    learner.accumulate(batch, np.zeros(len(batch)), teacher=learner.teacher_scores(batch))
    assert batch.support is not None
    lessons = []
    for step in batch.steps:
        mine, theirs = (step_distributions(m, step) for m in (model, teacher))
        for token in range(len(step.completion_ids)):
            ids = step.support[token : token + 1].ids.tolist() if step.support else []
            ids = ids or list(range(VOCABULARY))
            of, to = mine[token, ids].log_softmax(-1), theirs[token, ids].log_softmax(-1).detach()
            of, to = (of, to) if form == "reverse_top_k" else (to, of)
            lessons.append((of.exp() * (of - to)).sum())
    (torch.from_numpy(token_weights(batch, algorithm)) * 0.5 * torch.stack(lessons)).sum().backward()
    wanted = gradients(model)
    assert distance(learner_gradients(learner), wanted) <= 1e-10 * norm(wanted)
    assert norm(wanted) > 1e-3


def raw_logits(model: Any, step: Step) -> torch.Tensor:
    ids = torch.from_numpy(step.full_ids.astype(np.int64))[None]
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0, len(step.prompt_ids) - 1 : -1]
    return found


LOSSES = "ppo_clip", "gspo", "cispo", "dppo", "importance_sampling"


@pytest.mark.quick(5)
@pytest.mark.parametrize(("loss", "layout"), [*product(LOSSES, ["step", "chain", "tree within group"])])
def test_two_updates_are_those_of_each_step_with_masked_logits(loss: str, layout: str) -> None:
    """Reference and teacher included."""
    optimizer = OptimizerConfig(learning_rate=0.02, weight_decay=0.1, max_grad_norm=0.5)
    model, reference, teacher = exact(), exact(seed=5), exact(seed=6)
    groups, section = cut(forked_groups(groups=1)), DistillationConfig(teacher="T", coef=0.3, rewards=0.7)
    algorithm = AlgorithmConfig(
        policy_loss=loss, kl=KlConfig(coef=0.1), distillation=section, entropy_coef=(0.01, 0.01)
    )
    training: Any = {"epochs_per_batch": 2, "max_tokens_per_microbatch": 9, "optimizer": optimizer, **LAYOUTS[layout]}
    learner = make_learner(model, algorithm, reference=reference, teacher=teacher, **training)
    before, results = weights_of(model), learner.train_batch(groups)
    advantage = taught_advantages(model, teacher, groups, section)
    with torch.no_grad():
        theirs = np.concatenate([full(step_logprobs(reference, step)[0]) for step in flatten(groups).steps])
    wanted = updated_by_hand(
        model, groups, optimizer, lambda old: separate(model, groups, algorithm, old, theirs, advantage=advantage)
    )
    assert distance(weights_of(learner.model), weights_of(model)) <= 1e-12 * norm(before)
    assert distance(before, weights_of(model)) > 1e-2 * norm(before)
    for result, alone in zip(results, wanted, strict=True):
        for name in ("loss", "kl", "entropy", "ratio_max", "ratio_min"):
            assert result.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-11)
    assert results[0].metrics["ratio_max"] == pytest.approx(1, abs=1e-12)


FILTERS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 20},
    {"min_p": 0.05},
    {"top_p": 0.9, "top_k": 20},
    {"top_k": 20, "min_p": 0.05},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05},
]


@pytest.mark.quick(4)
@pytest.mark.parametrize("lock_step", [True, False])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_ratios_are_one_as_long_as_the_weights_are_the_samplers(
    filters: dict[str, Any], lock_step: bool, tmp_path: Path
) -> None:
    """Sampled, written to a shard and read again, then scored in every packing.

    The engine rounds logits to float32 before it samples, and records log-probabilities in float32: 1e-12 is against
    the filters applied anew, in float64, to the logits of each step alone.
    """
    model = exact()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 4
    scripts = [replace(script, filters=filters, max_tokens=12) for script in random_scripts(3)]
    played, _ = recorded(model, scripts, lock_step=lock_step, stop_token_ids=[])
    rewarded = [(steps, float(attempt)) for attempt, steps in enumerate(played)]
    shard = write_shard(tmp_path, "one", [make_group(rewarded)])
    again = read_shard(tmp_path, shard)
    batch = flatten([make_group([(again[trajectory_id(group_id(0), n)], r) for n, (_, r) in enumerate(rewarded)])])

    sampled, kept = [], list[int]()
    for step in batch.steps:
        exactly = replace(step.sampling, temperature=float(np.float32(step.sampling.temperature)))
        for token, of_token in enumerate(full(raw_logits(model, step))):
            probabilities = slow_filters(of_token, exactly)
            assert step.support is not None
            ids = np.flatnonzero(probabilities)
            assert step.support[token : token + 1].ids.tolist() == (ids.tolist() if len(ids) < VOCABULARY else [])
            kept.append(len(ids))
            sampled.append(np.log(probabilities[step.completion_ids[token]]))
    assert len(batch) > 100 and 1 < np.mean(kept) < VOCABULARY
    np.testing.assert_allclose(batch.logp_rollout, sampled, rtol=0, atol=1e-5)
    for layout, budget in product(LAYOUTS, [9, 8192]):
        learner = make_learner(model, max_tokens_per_microbatch=budget, **LAYOUTS[layout])
        ratios = np.exp(learner.logprobs(batch) - sampled)
        assert np.abs(ratios - 1).max() <= 1e-12
    unmasked = np.exp(learner.logprobs(replace(batch, support=None)) - sampled)
    assert np.abs(unmasked - 1).max() > 1e-3
