"""Which models tree attention can express, judged by their configuration; and what no packing can."""

from __future__ import annotations

import math

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from treadle.core.errors import ConfigError

_LAYERS = {"full_attention", "attention", "sliding_attention"}
# Configurations of state-space and gated-delta models that name no layer types.
_RECURRENT = ("ssm_cfg", "state_size", "ssm_state_size", "mamba_d_state", "mamba_num_heads", "lru_width", "wkv_version")
_RECURRENT_TYPES = {"rwkv", "xlstm"}  # nor any field of that kind


def require_plain_attention(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model with layers that are not attention (state-space, gated delta, ...)."""
    if others := sorted(_layer_kinds(model.config.get_text_config()) - _LAYERS):
        raise ConfigError(
            f"model type {model.config.model_type!r} has layers {others}; full and sliding attention are supported"
        )


def _layer_kinds(text: PretrainedConfig) -> set[str]:
    """The kinds of layers that a configuration names."""
    return set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def why_not_packable(config: PretrainedConfig) -> str | None:
    """Return why the model's layers cannot share prefixes, or None where they can.

    Such a model keeps its own attention and computes every step as a row of its own.
    """
    text = config.get_text_config()
    if strange := _layer_kinds(text) - _LAYERS:
        return f"it has {', '.join(sorted(strange))} layers"
    if recurrent := [name for name in _RECURRENT if getattr(text, name, None) is not None]:
        return f"it has recurrent layers ({recurrent[0]} is set)"
    if text.model_type in _RECURRENT_TYPES:
        return f"it has recurrent layers (model_type is {text.model_type})"
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        return "it has cross-attention"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "its attention scores are soft-capped (attn_logit_softcapping is set)"
    return None


def refuse_randomness(model: PreTrainedModel) -> None:
    """Raise ConfigError for dropout or routing noise: what is trained would not be the policy that sampled."""
    rates = {f"dropout of {name}": m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    for name, value in model.config.get_text_config().to_dict().items():
        unused = name.startswith(("summary_", "classifier_"))  # of heads that a causal LM does not have
        if not unused and ("dropout" in name or "jitter" in name or name.endswith("_pdrop")):
            rates[name] = value
    for name, value in rates.items():
        if isinstance(value, float) and value > 0:
            raise ConfigError(f"{type(model).__name__} has {name} = {value}; set it to 0 in the model's config")


def slides(config: PretrainedConfig, layer: int) -> bool:
    """Return whether the configuration says that this layer's attention has a sliding window.

    Without layer types, a window applies to every layer; one as long as the model's context is none.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return bool(kinds[layer] == "sliding_attention")
    window = getattr(config, "sliding_window", None)
    return window is not None and window < getattr(config, "max_position_embeddings", math.inf)
