"""Models whose layers keep a state: what they train in float32, over several updates, and combined with the rest."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models import DELTA, HYBRIDS, cached_logits, distance, exact, norm, tiny, weights_of
from tests.training import reference
from tests.training.reference import (
    LAYOUTS,
    accumulated,
    forked_groups,
    make_learner,
    separate_gradient,
    updated_by_hand,
)
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.types import Step
from treadle.packing.flat import flatten
from treadle.training.config import OptimizerConfig


def split_logprobs(model: PreTrainedModel, step: Step) -> tuple[Tensor, Tensor]:
    """As `step_logprobs`, by transformers alone, in pieces of three tokens."""
    ids, start = torch.from_numpy(step.full_ids.astype(np.int64))[None], len(step.prompt_ids)
    logits = cached_logits(model, ids.split(3, 1))[start - 1 : -1]
    distribution = (logits / float(np.float32(step.sampling.temperature))).log_softmax(-1)
    chosen = distribution.gather(1, ids[0, start:, None])[:, 0]
    return chosen, -(distribution.exp() * distribution).sum(-1)


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", HYBRIDS)
def test_gradients_in_float32_are_those_of_each_step_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a chunked rule by itself rounds more: at most twice as far as transformers alone is if it is split."""
    algorithm, groups = AlgorithmConfig(entropy_coef=0.01), forked_groups(groups=1)
    model = tiny(family)
    wanted, _ = separate_gradient(model, groups, algorithm)
    limit = 5e-6
    if family in DELTA:
        monkeypatch.setattr(reference, "step_logprobs", split_logprobs)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():  # states are written in place
            split, _ = separate_gradient(model, groups, algorithm)
        limit = max(limit, 2 * distance(split, wanted) / norm(wanted))
    for layout, budget in (("step", 8192), ("chain", 60), ("tree within batch", 8192), ("tree within batch", 9)):
        learner = make_learner(model, algorithm, max_tokens_per_microbatch=budget, **LAYOUTS[layout])
        found, _ = accumulated(learner, groups)
        assert distance(found, wanted) <= limit * norm(wanted), (layout, budget)
    assert limit < 1e-4


OPTIMIZER = OptimizerConfig(learning_rate=0.02, weight_decay=0.1, max_grad_norm=0.5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("layout", ["step", "chain", "tree within group", "tree within batch"])
@pytest.mark.parametrize("family", ["qwen3-5", "lfm2"])
def test_two_updates_are_those_of_each_step_alone(family: str, layout: str) -> None:
    """By hand with AdamW and clipping, in chunks that cut most segments; the second one's ratios are clipped."""
    model, groups = exact(family), forked_groups(groups=1)
    learner = make_learner(
        model, epochs_per_batch=2, max_tokens_per_microbatch=9, optimizer=OPTIMIZER, **LAYOUTS[layout]
    )
    assert max(map(learner.forward.passes, learner.trees(flatten(groups)))) > 1
    before, results = weights_of(model), learner.train_batch(groups)
    wanted = updated_by_hand(model, groups, OPTIMIZER)
    moved = distance(before, weights_of(model))
    assert distance(weights_of(learner.model), weights_of(model)) <= 1e-12 * norm(before) and moved > 0.1
    for result, alone in zip(results, wanted, strict=True):
        assert result.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-11)
        assert result.metrics["clip_fraction"] == pytest.approx(alone.metrics["clip_fraction"])
    assert wanted[1].metrics["clip_fraction"] > 0.1
