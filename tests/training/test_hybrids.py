"""Models whose layers keep a state: what they train in float32, over several updates, and combined with the rest."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models import (
    DELTA,
    HYBRIDS,
    cached_logits,
    distance,
    exact,
    full,
    gradients,
    make_step,
    norm,
    step_logprobs,
    tiny,
    weights_of,
)
from tests.training import reference
from tests.training.reference import (
    LAYOUTS,
    LORA,
    accumulated,
    adapted,
    forked_groups,
    literal_loss,
    make_learner,
    randomize,
    separate_gradient,
    taught_advantages,
    updated_by_hand,
)
from treadle.algorithms.config import AlgorithmConfig, DistillationConfig, KlConfig
from treadle.core.types import Step
from treadle.models.config import LoraConfig
from treadle.models.lora import adapt
from treadle.models.states import stateful_layers
from treadle.packing.flat import flatten
from treadle.training.config import OptimizerConfig, WarmStartConfig
from treadle.training.objective import TracedGroups
from treadle.training.optimizer import learning_rate
from treadle.training.sft import Supervised


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


BESIDE = forked_groups(groups=1)
CHUNKED: dict[str, Any] = {"max_tokens_per_microbatch": 9, **LAYOUTS["tree within group"]}


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", HYBRIDS)
def test_adapters_of_all_linear_layers_train_as_in_each_step_alone(family: str) -> None:
    model = adapted(exact(family), LoraConfig(rank=2, alpha=4, targets="all-linear"))
    literal_loss(model, BESIDE, AlgorithmConfig(), None).loss.backward()
    wanted = gradients(model)
    learner = make_learner(model, gradient_checkpointing=True, **CHUNKED)
    accumulated(learner, BESIDE)
    assert distance(gradients(learner.model), wanted) <= 1e-12 * norm(wanted)
    in_layers = [n for n in wanted if ".lora_B." in n and norm({n: wanted[n]}) > 0]
    names = {name for name, module in model.named_modules() if module in stateful_layers(model)}
    assert any(n.startswith(f"{name}.") for n in in_layers for name in names)


@pytest.mark.parametrize("family", ["qwen3-5", "lfm2"])
def test_a_reference_and_a_teacher_may_keep_states_too(family: str) -> None:
    batch, model, other = flatten(BESIDE), exact(family), exact(family, seed=5)
    policy, theirs = (full(torch.cat([step_logprobs(m, s)[0] for s in batch.steps])) for m in (model, other))
    learner = make_learner(model, AlgorithmConfig(kl=KlConfig(coef=0.1)), reference=other, **CHUNKED)
    gap = (policy - theirs)[batch.mask]
    assert learner.update(batch).metrics["kl"] == pytest.approx((np.exp(-gap) - 1 + gap).mean(), rel=1e-9)
    section = DistillationConfig(teacher="T", coef=0.5)
    algorithm = AlgorithmConfig(distillation=section)
    learner = make_learner(model, algorithm, teacher=other, traced=TracedGroups(share=1.0), **CHUNKED)
    [result] = learner.train_batch(BESIDE)
    traced = np.concatenate([trace.advantage for trace in result.traces])
    expected = taught_advantages(model, other, BESIDE, section)
    np.testing.assert_allclose(traced[batch.mask], expected[batch.mask], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3-5", "lfm2"])
def test_a_warm_start_is_that_of_plain_calls(family: str) -> None:
    """Its scores are float32."""
    config = WarmStartConfig(demonstrations="x", steps=2, learning_rate=1e-2)
    model, calls = exact(family), [[(s.prompt_ids, s.completion_ids) for s in flatten(BESIDE).steps[:3]]]
    learner = make_learner(model, **CHUNKED)
    supervised = Supervised(learner.forward, config)
    losses = [supervised.step(calls, number) for number in range(2)]
    adam = torch.optim.AdamW(model.parameters(), betas=config.optimizer.betas, weight_decay=0.0)
    before = weights_of(model)
    for number in range(2):
        adam.zero_grad()
        steps = [make_step(prompt, completion) for prompt, completion in calls[0]]
        loss = -torch.cat([step_logprobs(model, step)[0] for step in steps]).mean()
        assert losses[number] == pytest.approx(float(loss.detach()), rel=1e-6)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        adam.param_groups[0]["lr"] = learning_rate(config.optimizer, number, 2)
        adam.step()
    moved = distance(before, weights_of(model))
    assert distance(weights_of(learner.model), weights_of(model)) <= 1e-4 * moved and moved > 0.1


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", HYBRIDS)
def test_bfloat16_rounds_as_transformers_does_in_it(family: str) -> None:
    """By autocast: at most twice as far from float32 as each step alone is. With a base in bfloat16: near."""
    model, algorithm = tiny(family), AlgorithmConfig(entropy_coef=0.01)
    wanted, _ = separate_gradient(model, BESIDE, algorithm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone, _ = separate_gradient(model, BESIDE, algorithm)
    for budget in (9, 8192):
        learner = make_learner(
            model, algorithm, precision="bfloat16", **{**CHUNKED, "max_tokens_per_microbatch": budget}
        )
        found, _ = accumulated(learner, BESIDE)
        assert 1e-3 * norm(wanted) < distance(found, wanted) <= 2 * distance(alone, wanted) < norm(wanted)
    if family in ("qwen3-next", "lfm2-moe"):
        return  # weights of experts as small as these are nothing that torch multiplies in bfloat16
    adapt(model, None, LORA, 1, half=True, weights=True)
    randomize(model)
    exactly, _ = accumulated(make_learner(copy.deepcopy(model).float(), **CHUNKED), BESIDE)
    found, _ = accumulated(make_learner(model, precision="bfloat16_pure", **CHUNKED), BESIDE)
    assert 0 < distance(found, exactly) < 0.5 * norm(exactly)
