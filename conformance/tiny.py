"""The tiny linear model of `reference.py` as a model of transformers, for trainers that take one (needs torch)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from conformance import reference


class TinyConfig(PretrainedConfig):
    """One layer of attention with equal weights."""

    model_type = "conformance_tiny"
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = reference.VOCABULARY, reference.WIDTH, 1, 1


class MeanOfPast(nn.Module):
    """Attention with queries of 0: the mean of all values up to each token, by whatever implementation is chosen."""

    is_causal, layer_idx, num_key_value_groups = True, 0, 1

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        heads = x[:, None]  # [1, 1, T, D]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _mean)
        mean: Tensor = attend(self, torch.zeros_like(heads), heads, heads, None, scaling=1.0)[0]
        return mean.flatten(2)


def _mean(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **_: Any) -> tuple[Tensor, None]:
    count = torch.arange(1, value.shape[2] + 1, dtype=value.dtype)[:, None]
    return (value.cumsum(2) / count).transpose(1, 2), None


class TinyDecoder(PreTrainedModel):
    """ids -> h: `reference.features`."""

    config_class, _supports_sdpa, _supports_attention_backend = TinyConfig, True, True
    embedding: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.register_buffer("embedding", torch.from_numpy(reference.embedding()), persistent=False)
        self.attention = MeanOfPast(config)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> BaseModelOutputWithPast:
        place = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = (1 + place[..., None].double() / 8) * self.embedding[input_ids]
        return BaseModelOutputWithPast(last_hidden_state=x + self.attention(x))


class TinyModel(PreTrainedModel, GenerationMixin):
    """h -> logits by W, the only parameter, in float64."""

    config_class, base_model_prefix, _supports_sdpa, _supports_attention_backend = TinyConfig, "model", True, True

    def __init__(self, config: TinyConfig | None = None) -> None:
        config = config or TinyConfig()
        super().__init__(config)
        self.model = TinyDecoder(config)
        self.lm_head = nn.Linear(reference.WIDTH, reference.VOCABULARY, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.lm_head.weight.copy_(torch.from_numpy(reference.head()))

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, input_ids: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids, **kwargs).last_hidden_state))
