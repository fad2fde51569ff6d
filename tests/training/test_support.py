"""Where filters left tokens out, all models score over what was left: exactly, in every packing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import VOCABULARY, distance, exact, gradients, norm, step_logprobs, weights_of
from tests.training.reference import (
    LAYOUTS,
    accumulated,
    cut,
    forked_groups,
    learner_gradients,
    make_learner,
    separate_gradient,
    updated_by_hand,
)
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig, KlConfig
from treadle.algorithms.reductions import token_weights
from treadle.core.support import Support
from treadle.core.types import Step
from treadle.packing.flat import flatten
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
    groups = [
        replace(g, trajectories=tuple(replace(t, steps=tuple(map(full, t.steps))) for t in g.trajectories))
        for g in plain
    ]
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
        mine, theirs = (logits(m, step) for m in (model, teacher))
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


def logits(model: Any, step: Step) -> torch.Tensor:
    ids = torch.from_numpy(step.full_ids.astype(np.int64))[None]
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0, len(step.prompt_ids) - 1 : -1]
    return found / float(np.float32(step.sampling.temperature))


@pytest.mark.parametrize("layout", ["step", "chain", "tree within group"])
def test_two_updates_are_those_of_each_step_alone(layout: str) -> None:
    optimizer = OptimizerConfig(learning_rate=0.02, weight_decay=0.1, max_grad_norm=0.5)
    model, groups = exact(), cut(forked_groups(groups=1))
    learner = make_learner(
        model, epochs_per_batch=2, max_tokens_per_microbatch=9, optimizer=optimizer, **LAYOUTS[layout]
    )
    before, results = weights_of(model), learner.train_batch(groups)
    wanted = updated_by_hand(model, groups, optimizer)
    assert distance(weights_of(learner.model), weights_of(model)) <= 1e-12 * norm(before)
    for result, alone in zip(results, wanted, strict=True):
        assert result.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-11)
