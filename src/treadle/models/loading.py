"""Building and loading Hugging Face models."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from treadle.core.errors import ConfigError
from treadle.core.files import prove_files, sha256_of
from treadle.models.chat import load_tokenizer
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.model_cache import remedy_for
from treadle.models.model_files import base_directory, require_model, tokenizer_directory
from treadle.models.pretrained import load_pretrained
from treadle.models.support import refuse_randomness

MODEL_FILES = ("config.json", "model.safetensors")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes."""
    return sha256_of(path.read_bytes())


def make_model(
    config: ModelConfig,
    vocabulary: int,
    seed: int,
    weights: bool = True,
    lora: LoraConfig | None = None,
    half: bool = False,
    whole: bool = False,
) -> PreTrainedModel:
    """Return the configured model in float32, without dropout; a built one is initialized from the seed.

    weights: if false, all tensors are on the meta device: shapes without memory. Files are then compared with the model
    by name and shape, and not hashed. lora, half: adapters, beside a base in bfloat16 (`models.lora`). whole: with the
    part that sees images (`training.vision: train`); default: the language model alone. Raises ConfigError for a
    directory without a model, unknown config fields, a vocabulary smaller than the tokenizer's
    `vocabulary` ids, dropout or routing noise; DamageError as `load_tokenizer`.
    """
    if config.build is None:
        model = _load(base_directory(config), "model.path", weights, whole)
    else:
        with nullcontext() if weights else torch.device("meta"):
            model = _build(config, vocabulary, seed, whole)
    text = model.config.get_text_config()
    if text.vocab_size < vocabulary:
        raise ConfigError(
            f"the model's vocabulary of {text.vocab_size} is smaller than the tokenizer's {vocabulary}; set "
            "model.tokenizer to the model's own tokenizer"
        )
    refuse_randomness(model, whole)
    if lora is not None or config.adapter is not None:
        from treadle.models.lora import adapt  # peft, which only adapters need

        adapt(model, config.adapter, lora, seed, half, weights)
    return model


def load_frozen(path: str, field: str, policy: PreTrainedModel, weights: bool = True) -> PreTrainedModel:
    """Return the model in a directory named by a setting, in float32, for scoring the policy's tokens.

    weights: as for `make_model`.

    Raises ConfigError as `make_model`, and if it cannot score everything that the policy may sample.
    """
    model = _load(require_model(path, field), field, weights)
    refuse_randomness(model)
    mine, theirs = policy.config.get_text_config(), model.config.get_text_config()
    for name in ("vocab_size", "max_position_embeddings"):
        needed = getattr(mine, name, 0)
        # Models that name no context have no limit.
        there = getattr(theirs, name, needed)
        if there < needed:
            raise ConfigError(f"{field}: {name} of {path!r} is {there}, smaller than the model's {needed}")
    return model


def load_teacher(path: str, config: ModelConfig, policy: PreTrainedModel, weights: bool = True) -> PreTrainedModel:
    """Return the teacher in a directory, as `load_frozen`. config: configuration of the policy.

    Raises ConfigError, too, if a token of the policy's tokenizer has another id in the teacher's, or none.
    """
    field = "algorithm.distillation.teacher"
    mine, theirs = (
        {ident: token for token, ident in load_tokenizer(directory).get_vocab().items()}
        for directory in (tokenizer_directory(config), require_model(path, field))
    )
    for ident in sorted(mine):
        if (token := theirs.get(ident)) != mine[ident]:
            raise ConfigError(
                f"{field}: token {ident} is {mine[ident]!r} for the trained model and "
                f"{'none' if token is None else repr(token)} for {path!r}, which would score other text; use a teacher "
                "with the same vocabulary"
            )
    return load_frozen(path, field, policy, weights)


def _load(directory: Path, field: str, weights: bool, whole: bool = False) -> PreTrainedModel:
    if weights:
        prove_files(directory, MODEL_FILES, remedy_for(directory))
    return load_pretrained(directory, field, weights=weights, whole=whole)


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute buffers that no model file contains, such as rotary frequencies, for newly allocated tensors.

    Raises ConfigError for a model that computes some only where it is made.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers skips those
    made = [
        (f"{path}.{name}", buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    ]
    for _, buffer in made:
        buffer.fill_(_UNSET)
    _compute_buffers(model, model)
    if left := [name for name, buffer in made if buffer.numel() and bool((buffer == _UNSET).all())]:
        raise ConfigError(
            f"{type(model).__name__} computes {left[0]} only where it is made, so that it cannot be loaded in parts"
        )


_UNSET = 77  # in buffers that are not computed yet


def _compute_buffers(module: nn.Module, owner: PreTrainedModel) -> None:
    """As transformers initializes modules: each by the innermost of its models that contain it."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    if module._non_persistent_buffers_set:
        owner._init_weights(module)
    for child in module.children():
        _compute_buffers(child, owner)


def _read_by_the_model(config: PretrainedConfig, names: Iterable[str]) -> set[str]:
    """Return the names that the model's own code reads from its configuration, as Qwen 3 MoE does `head_dim`."""
    if not names or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return set()
    source = inspect.getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__module__])
    return {name for name in names if re.search(rf'\bconfig(\.|, "){re.escape(name)}\b', source)}


def _build(config: ModelConfig, vocabulary: int, seed: int, whole: bool) -> PreTrainedModel:
    fields = dict(config.build or {})
    model_type = fields.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING.keys(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"model.build: transformers knows no model_type {model_type!r}{hint}")
    _check_kind(model_type, whole)
    if whole:
        fields["text_config"] = {"vocab_size": vocabulary, **fields.get("text_config", {})}
    else:
        fields = {"vocab_size": vocabulary, **fields}
    try:
        model_config = AutoConfig.for_model(model_type, **fields)
    except (ValueError, StrictDataclassError) as error:
        raise ConfigError(f"model.build: {' '.join(str(error).split())}") from error
    _check_fields(model_config, fields, model_type)
    make: Any = AutoModelForMultimodalLM if whole else AutoModelForCausalLM
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model: PreTrainedModel = make.from_config(model_config, dtype=torch.float32)
    return model


def _check_kind(model_type: str, whole: bool) -> None:
    """Raise ConfigError for a type of model that is not built: no language model, or with images if not `whole`."""
    kind = CONFIG_MAPPING[model_type]
    sees = kind in MODEL_FOR_MULTIMODAL_LM_MAPPING and "vision_config" in kind.sub_configs
    if whole and not sees:
        raise ConfigError(
            f"training.vision is 'train', but models of model.build's model_type {model_type!r} see no images"
        )
    if not whole and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        remedy = "; its part that sees images would be random: set training.vision=train" if sees else ""
        raise ConfigError(f"model.build: model_type {model_type!r} is not a causal language model{remedy}")


def _check_fields(config: PretrainedConfig, fields: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for fields that a configuration does not know, also in its parts."""
    accepted = {*type(config)().to_dict(), *config.attribute_map}
    unread = fields.keys() - accepted - {"rope_parameters", "rope_theta"}
    if unknown := sorted(unread - _read_by_the_model(config, unread)):
        near = difflib.get_close_matches(unknown[0], sorted(accepted), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"model.build: {where} knows no {unknown}{hint}")
    for name in type(config).sub_configs.keys() & fields.keys():
        part: PretrainedConfig = getattr(config, name)
        _check_fields(part, {k: v for k, v in fields[name].items() if k != "model_type"}, f"{where}.{name}")
