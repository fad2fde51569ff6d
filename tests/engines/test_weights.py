"""Weights as one flat mapping, and what may be trained and served at all."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import FAMILIES, tiny
from treadle.core.errors import ConfigError
from treadle.models.support import require_plain_attention
from treadle.models.weights import unique_weights, weights_sha256


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_parameter_appears_once_and_is_not_copied(family: str) -> None:
    model = tiny(family)
    weights = unique_weights(model)
    assert {t.data_ptr() for t in weights.values()} == {p.data_ptr() for p in model.parameters()}
    assert len(weights) == len(list(model.parameters()))
    assert ("lm_head.weight" in weights) is (not model.config.tie_word_embeddings)
    assert not any(t.requires_grad for t in weights.values())


def test_the_hash_sees_every_bit_name_type_and_shape() -> None:
    weights = {"a": torch.arange(6.0), "b": torch.zeros(2, 2)}
    seen = {weights_sha256(weights)}
    for change in (
        {"a": torch.arange(6.0).nextafter(torch.tensor(9.0))},
        {"a": torch.arange(6.0).view(2, 3)},
        {"a": torch.arange(6)},
        {"b": torch.zeros(2, 2).neg()},  # -0.0
        {"c": torch.zeros(1)},
    ):
        seen.add(weights_sha256({**weights, **change}))
    seen.add(weights_sha256({"a": weights["a"], "c": weights["b"]}))
    assert len(seen) == 7


def test_the_hash_sees_neither_order_nor_strides() -> None:
    square = torch.arange(9.0).view(3, 3)
    one = {"a": square, "b": torch.ones(1)}
    other = {"b": torch.ones(1), "a": square.t().contiguous().t()}
    assert weights_sha256(one) == weights_sha256(other)


def test_layers_that_are_no_attention_are_refused() -> None:
    config = AutoConfig.for_model(
        "qwen3_next", num_hidden_layers=2, vocab_size=8, hidden_size=16, intermediate_size=8, num_experts=2
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"'qwen3_next' has layers \['linear_attention'\]"):
        require_plain_attention(model)
    for family in FAMILIES:
        require_plain_attention(tiny(family))
