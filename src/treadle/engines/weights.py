"""The weights of a Hugging Face model as one flat mapping, tied ones once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.core.errors import ConfigError

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def unique_weights(model: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor (not copied) for every parameter and persistent buffer, a tied tensor under its first name."""
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Hex digest over names, dtypes, shapes and bytes, in the order of names."""
    return weights_digest(sorted(weights.items()))


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """`weights_sha256` of (name, tensor) pairs that come in the order of names, one held at a time."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def require_plain_attention(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model with layers that are not attention (state-space, gated delta, ...)."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    if others := sorted(kinds - _ATTENTION_LAYERS):
        raise ConfigError(
            f"model type {model.config.model_type!r} has layers {others}; full and sliding attention are supported"
        )
