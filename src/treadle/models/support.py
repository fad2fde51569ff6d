"""Which models tree attention supports, judged by their configuration; and which none of the packings do."""

from __future__ import annotations

import math
from itertools import chain

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from treadle.core.errors import ConfigError

_ATTENTION = {"full_attention", "attention", "sliding_attention"}
_STATEFUL = {"linear_attention", "mamba", "mamba2", "conv", "hybrid"}  # hybrid: attention and Mamba side by side
_MAMBA_1 = {"mamba", "falcon_mamba", "jamba", "zamba"}  # transformers' layer restarts if given several tokens
_UNBOUNDED = 2**20  # tokens
_NO_MIXER = {"mlp", "moe"}  # blocks of Nemotron-H that see only one token


def layer_kinds(text: PretrainedConfig) -> list[str]:
    """Return the kinds of layers in a configuration, in order."""
    return list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def stateful_kinds(config: PretrainedConfig) -> set[str]:
    """Return the kinds of a model's layers that process tokens sequentially with a state."""
    return set(layer_kinds(config.get_text_config())) & _STATEFUL


def decoding_gap(config: PretrainedConfig) -> tuple[float, str] | None:
    """Return `ModelInfo.decoding_gap`.

    Convolutions give the same sums for one token and for several, recurrences do not: in float32, over 100 tokens,
    log-probabilities of tiny random gated delta nets differed by up to 3.5e-4. transformers bounds Nemotron-H's time
    steps from below only for several tokens; a bound of 0.01 made a difference of up to 0.03.
    """
    recurrent = stateful_kinds(config) - {"conv"}
    if not recurrent:
        return None
    if getattr(config, "time_step_min", None) and config.model_type == "nemotron_h":
        return 0.1, "its Mamba layers limit time steps (time_step_min) in scoring, but not in sampling"
    return 0.01, "its recurrent layers go token by token in sampling, and by chunks in scoring"


def mixing_layers(config: PretrainedConfig) -> set[int]:
    """Return the numbers of the layers in which tokens see others."""
    text = config.get_text_config()
    kinds = layer_kinds(text) or [""] * text.num_hidden_layers
    return {number for number, kind in enumerate(kinds) if kind not in _NO_MIXER}


def attending_layers(config: PretrainedConfig) -> set[int]:
    """Return the numbers of the layers that keep keys and values."""
    kinds = layer_kinds(config.get_text_config())
    return {n for n in mixing_layers(config) if not kinds or kinds[n] == "hybrid" or kinds[n] not in _STATEFUL}


def why_not_packable(config: PretrainedConfig) -> str | None:
    """Return why the model's layers cannot share prefixes, or None if they can, judged by its configuration.

    Such a model keeps its own attention and computes every step as a separate row.
    """
    text = config.get_text_config()
    if strange := set(layer_kinds(text)) - _ATTENTION - _STATEFUL - _NO_MIXER:
        return f"it has {', '.join(sorted(strange))} layers"
    if text.model_type in _MAMBA_1:
        return "its Mamba layers cannot continue from a state with several tokens"
    if config.is_encoder_decoder or getattr(text, "add_cross_attention", False):
        return "it has cross-attention"
    return None


def context_of(config: PretrainedConfig) -> int:
    """Return the most tokens of a sequence; 2**20 for a model that names no limit, as those without positions."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", _UNBOUNDED))


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model without its head; the model itself if it does not separate them."""
    decoder: PreTrainedModel = model.get_decoder()
    # For Llama 4, which has another name in `base_model_prefix`.
    inner = getattr(model, "model", None)
    return inner if decoder is model and isinstance(inner, PreTrainedModel) else decoder


def refuse_randomness(model: PreTrainedModel, whole: bool = False) -> None:
    """Raise ConfigError for dropout or routing noise: the trained policy would differ from the sampling one.

    whole: also of the part that sees images.
    """
    rates = {f"dropout of {name}": m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    parts = [model.config.get_text_config(), *([model.config.vision_config] if whole else ())]
    for name, value in chain.from_iterable(part.to_dict().items() for part in parts):
        # Settings of heads that a causal LM lacks.
        unused = name.startswith(("summary_", "classifier_"))
        if not unused and ("dropout" in name or "jitter" in name or name.endswith("_pdrop")):
            rates[name] = value
    for name, value in rates.items():
        if isinstance(value, float) and value > 0:
            raise ConfigError(f"{type(model).__name__} has {name} = {value}; set it to 0 in the model's config")


def slides(config: PretrainedConfig, layer: int) -> bool:
    """Return whether the configuration gives this layer's attention a sliding window.

    Without layer types, a window applies to every layer; one as long as the model's context does not count.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return bool(kinds[layer] == "sliding_attention")
    window = getattr(config, "sliding_window", None)
    return window is not None and window < getattr(config, "max_position_embeddings", math.inf)
