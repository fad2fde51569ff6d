"""A model whose layers cannot share prefixes says so once and trains each step as a row of its own."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig

from tests.models import INEXACT, ROW_FAMILIES, distance, exact, make_group, make_step, norm, tiny
from tests.training.reference import (
    COUPLED,
    LAYOUTS,
    accumulated,
    earlier_policy,
    forked_groups,
    make_learner,
    over_ranks,
    separate_gradient,
)
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.errors import DataError
from treadle.models.support import why_not_packable
from treadle.packing.flat import flatten
from treadle.training.learner import Learner

REASONS = {
    "lfm2": "it has conv layers",
    "gemma2": r"its attention scores are soft-capped \(attn_logit_softcapping is set\)",
    "mamba": "it has linear_attention layers",
    "mamba2": "it has linear_attention layers",
    "qwen3-next": "it has linear_attention layers",
    "falcon-h1": "it has hybrid layers",
}


def rows_learner(family: str, *args: Any, **training: Any) -> Learner:
    with pytest.warns(UserWarning, match="cannot share prefixes") as record:
        learner = make_learner(exact(family), *args, **training)
    assert len(record) == 1
    return learner


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers tells on standard error which faster kernels it lacks."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", list(ROW_FAMILIES))
def test_it_warns_once_with_the_reason_and_trains_as_each_step_alone(family: str) -> None:
    """In rows that, padding included, never exceed the budget: a hard bound."""
    groups = forked_groups(groups=1)
    algorithm = AlgorithmConfig(entropy_coef=0.05)
    model = exact(family)
    old = earlier_policy(model, groups)
    wanted, metrics = separate_gradient(model, groups, algorithm, old)
    for budget in (26, 60, 8192):
        with pytest.warns(UserWarning, match=rf"{REASONS[family]}\): it is trained with packing 'step'") as record:
            learner = make_learner(exact(family), algorithm, max_tokens_per_microbatch=budget)
        assert len(record) == 1
        sizes: list[tuple[int, int]] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            sizes.append(kwargs["input_ids"].shape)  # noqa: B023

        learner.model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
        found, totals = accumulated(learner, groups, old)
        assert max(rows * longest for rows, longest in sizes) <= budget
        assert max(rows for rows, _ in sizes) > 1 or budget == 26  # padding is tested
        assert distance(found, wanted) <= INEXACT.get(family, 1e-12) * norm(wanted)
        for name, value in metrics.items():
            assert totals[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.quick(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_packing_is_step_there(layout: str) -> None:
    groups = forked_groups()
    wanted, _ = separate_gradient(exact("lfm2"), groups, AlgorithmConfig(policy_loss=COUPLED))
    learner = rows_learner(
        "lfm2",
        AlgorithmConfig(policy_loss=COUPLED),
        max_tokens_per_microbatch=70,
        gradient_checkpointing=True,
        **LAYOUTS[layout],
    )
    for ranks in (1, 3):
        found, _ = over_ranks(learner, groups, None, ranks)
        assert distance(found, wanted) <= 1e-12 * norm(wanted)
    _, metrics = accumulated(learner, groups)
    trained = [step for step in flatten(groups).steps if len(step.completion_ids)]
    assert metrics["packed_sequences"] == len(trained)
    assert metrics["packed_tokens"] == sum(len(step.full_ids) for step in trained)


def test_a_step_longer_than_the_budget_is_an_error_there() -> None:
    learner = rows_learner("lfm2", max_tokens_per_microbatch=9)
    fits, long = make_step([1] * 5, [2] * 4), make_step([1] * 5, [2] * 5)
    learner.train_batch([make_group([([fits], 1.0)])])
    with pytest.raises(DataError, match=r"a call of 10 tokens exceeds max_tokens_per_microbatch = 9.*raise the budget"):
        learner.train_batch([make_group([([fits, long], 1.0)])])


# Which models


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("mamba", {}, "linear_attention"),
        ("falcon_mamba", {}, "linear_attention"),
        ("jamba", {}, "linear_attention"),
        ("bamba", {}, "linear_attention"),
        ("recurrent_gemma", {}, "linear_attention|recurrent layers"),
        ("minimax", {}, "linear_attention"),
        ("qwen3_5_text", {}, "linear_attention"),
        ("rwkv", {}, "model_type is rwkv"),
        ("xlstm", {}, "model_type is xlstm"),
        ("falcon_h1", {}, "hybrid"),
        ("llama4_text", {}, "chunked_attention"),
        ("deepseek_v32", {}, "indexed_attention"),
        ("bart", {}, "cross-attention"),
        ("whisper", {}, "cross-attention"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
        ("gemma2", {}, "soft-capped"),
    ],
)
def test_layers_that_cannot_share_prefixes_are_told_from_the_configuration(
    model_type: str, fields: dict[str, Any], reason: str
) -> None:
    assert re.search(reason, why_not_packable(AutoConfig.for_model(model_type, **fields)) or "")


@pytest.mark.parametrize(
    "model_type",
    [
        *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "ministral", "phi", "phi3", "gemma", "gemma3"),
        *(
            "gemma3_text",
            "gemma4_text",
            "olmo2",
            "olmo3",
            "olmoe",
            "granite",
            "granitemoe",
            "cohere",
            "cohere2",
            "glm4",
        ),
        *("smollm3", "starcoder2", "ernie4_5", "exaone4", "deepseek_v3", "opt", "gpt2", "gpt_neox", "seed_oss"),
    ],
)
def test_plain_attention_is_told_from_the_configuration(model_type: str) -> None:
    assert why_not_packable(AutoConfig.for_model(model_type)) is None


def test_soft_capping_that_is_switched_off_shares_prefixes() -> None:
    assert why_not_packable(tiny("gemma2", attn_logit_softcapping=None).config) is None
    groups = forked_groups()
    model = exact("gemma2", attn_logit_softcapping=None)
    wanted, _ = separate_gradient(model, groups, AlgorithmConfig())
    found, _ = accumulated(make_learner(model, max_tokens_per_microbatch=9), groups)
    assert distance(found, wanted) <= INEXACT["gemma2"] * norm(wanted)
