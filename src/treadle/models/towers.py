"""Towers of configured models: loaded when the first image comes, or part of a model that is trained."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel

from treadle.core.files import prove_files
from treadle.models.config import ModelConfig
from treadle.models.loading import MODEL_FILES, compute_buffers
from treadle.models.model_cache import remedy_for
from treadle.models.model_files import base_directory, names_code, tokenizer_directory
from treadle.models.multimodal import is_multimodal, stored_tensors, stored_weights
from treadle.models.vision import SEEING, ImageProcessor, Tower, check_family

_SHARED = WeakValueDictionary[tuple[Path, str], Tower]()


def takes_images(config: ModelConfig) -> bool:
    """Return whether images are supported for the configured model. Raises ConfigError."""
    places = [tokenizer_directory(config)] if config.build is not None else _places(config)
    if ImageProcessor.find(*places) is None:
        return False
    if config.build is not None:
        return config.build.get("model_type") in SEEING
    return json.loads((places[0] / "config.json").read_bytes()).get("model_type") in SEEING


def trained_tower(config: ModelConfig, model: PreTrainedModel, trained: bool = True) -> Tower:
    """Return the tower of a whole model in memory. trained: whether its features carry gradients."""
    places = [tokenizer_directory(config)] if config.build is not None else _places(config)
    return Tower(model, _processor(*places), trained)


def engine_tower(config: ModelConfig, whole: bool, device: str, copy: PreTrainedModel) -> Tower | None:
    """Return the tower for an engine with a copy of the configured model. whole: whether the copy contains it."""
    return trained_tower(config, copy, trained=False) if whole else tower_of(config, device)


def tower_of(config: ModelConfig, device: str) -> Tower | None:
    """Return the configured model's frozen tower; None for a model without one, or one that is built.

    Nothing is loaded before the first image; learner and engine of a process share it. Raises ConfigError.
    """
    return None if config.build is not None else frozen_tower(*_places(config), device=device)


def frozen_tower(directory: Path, *more: Path, device: str = "cpu") -> Tower | None:
    """As `tower_of`, for the model in a directory. more: where else the files of its processor may be."""
    if names_code(directory / "config.json"):
        return None  # refused where the model is loaded
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    if not is_multimodal(config):
        return None
    key = directory.resolve(), device
    if (tower := _SHARED.get(key)) is None:
        tower = _SHARED[key] = Tower(partial(load_tower, directory, device), _processor(directory, *more))
    return tower


def _places(config: ModelConfig) -> list[Path]:
    """Return where a processor may be, as for a renderer (`models.chat`)."""
    return [base_directory(config), tokenizer_directory(config)]


def _processor(*places: Path) -> ImageProcessor:
    return ImageProcessor.find(*places) or ImageProcessor(places[0])  # whose absence is reported with the first image


def load_tower(directory: Path, device: str = "cpu") -> PreTrainedModel:
    """Return a directory's model without decoder and head, in float32. Raises ConfigError or DamageError."""
    field = "model.path"
    prove_files(directory, MODEL_FILES, remedy_for(directory))
    model = _shapes(directory)
    stored = dict(stored_weights(model, stored_tensors(directory, field), directory, field))
    model.to_empty(device=torch.device("cpu"))
    compute_buffers(model)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in stored:
                tensor.copy_(stored[name])
    model.to(device)  # type: ignore[arg-type]  # a wrapper hides the signature
    model.requires_grad_(False)
    model.eval()
    return model


def tower_size(config: ModelConfig) -> int:
    """Return the number of weights that the configured model's frozen tower has; 0 if it is shown no images."""
    if config.build is not None or not takes_images(config):
        return 0
    return sum(weight.numel() for weight in _shapes(base_directory(config)).parameters())


def _shapes(directory: Path) -> PreTrainedModel:
    """Return a directory's model without decoder and head, and without memory. Raises ConfigError."""
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    check_family(config.model_type)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    language = {model.get_decoder(), model.get_output_embeddings()}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in language:
                setattr(module, name, None)
    return model
