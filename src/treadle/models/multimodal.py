"""Checkpoints with more than a language model: towers for images and sound, projectors, drafting heads (mtp).

    model.language_model.*, lm_head.*    the language part: loaded, trained, sampled from
    everything else                      the rest: stays in its file, and is written with every checkpoint and export

Output thus contains all of the input, under the original names, and the rest bit for bit. The original's class computes
text as before; its towers are removed, and need no memory. With `training.vision: train`, a model is kept whole, and
the rest is what transformers does not load; frozen, a tower is loaded separately once an image comes (`models.towers`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from treadle.core.errors import ConfigError
from treadle.models.weights import Rest, set_rest


def is_multimodal(config: PretrainedConfig) -> bool:
    """Return whether a directory with this configuration has a language model and more."""
    composite = config.get_text_config() is not config and not config.is_encoder_decoder
    if not composite or type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return False
    whole: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    return whole.__name__ in (config.architectures or ())


def keep_language_part(model: PreTrainedModel, directory: Path, field: str) -> None:
    """Remove all but decoder and head from a model that was loaded whole, and note what else its files contain.

    Raises ConfigError, naming the setting, if the language part or the names of its weights cannot be identified.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is model or head is None:
        raise ConfigError(f"{field}: {type(model).__name__} does not separate its language model from the rest")
    _take_off(model, {*decoder.modules(), *head.modules(), *model.get_input_embeddings().modules()})
    keep_whole(model, directory, field)


def keep_whole(model: PreTrainedModel, directory: Path, field: str) -> None:
    """Note the names of a model's weights in its files, and what else these contain. Raises ConfigError."""
    stored = stored_tensors(directory, field)
    names, taken = _all_names(model, stored, directory, field)
    set_rest(model, Rest(names, {name: tensor for name, tensor in stored.items() if name not in taken}))


def stored_tensors(directory: Path, field: str) -> dict[str, Tensor]:
    """Return all tensors of a directory by name, memory-mapped: none is read before it is used. Raises ConfigError."""
    if not (stored := _stored(directory)):
        raise ConfigError(f"{field}: no model.safetensors in {str(directory)!r}; save the model again as safetensors")
    return stored


def stored_weights(
    model: PreTrainedModel, stored: Mapping[str, Tensor], directory: Path, field: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and stored tensor of each weight of a model, tied ones once. Raises ConfigError for a missing one."""
    for name, there in _all_names(model, stored, directory, field)[0].items():
        if there not in stored:
            raise ConfigError(f"{field}: transformers converts {name} while loading; it cannot be read separately")
        yield name, stored[there]


def _all_names(
    model: PreTrainedModel, stored: Mapping[str, Tensor], directory: Path, field: str
) -> tuple[dict[str, str], set[str]]:
    """Return the first two results of `_names`. Raises ConfigError if there is a third."""
    names, taken, unnamed = _names(model, stored)
    if unnamed:
        raise ConfigError(
            f"{field}: {type(model).__name__} has {unnamed[0]}, and no file in {str(directory)!r} has it under a name "
            "that transformers would write; save the model again with transformers (save_pretrained)"
        )
    return names, taken


def keep_names(model: PreTrainedModel, directory: Path) -> None:
    """Write a language model under the names in its files, if they differ from the model's."""
    stored = _stored(directory)
    if all(any(name in stored for name in same) for same in _tied(model)):
        return
    names, _, unnamed = _names(model, stored)
    if not unnamed:
        set_rest(model, Rest(names, {}))


def _take_off(module: nn.Module, needed: set[nn.Module]) -> None:
    """Remove unneeded children and parameters from a module, at any depth."""
    for name, child in list(module.named_children()):
        if child in needed:
            continue
        if needed.isdisjoint(child.modules()):
            setattr(module, name, None)
        else:
            _take_off(child, needed)
    if module not in needed:
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            setattr(module, name, None)


def _stored(directory: Path) -> dict[str, Tensor]:
    # transformers prefers it to an index beside it.
    files = {"model.safetensors"}
    if not (directory / "model.safetensors").is_file():
        files = set(json.loads((directory / "model.safetensors.index.json").read_bytes())["weight_map"].values())
    stored: dict[str, Tensor] = {}
    for path in [directory / name for name in sorted(files)]:
        if path.is_file():
            with safe_open(path, "pt") as file:
                stored |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return stored


def _names(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> tuple[dict[str, str], set[str], list[str]]:
    """Return a model's names -> names in its files; all names of its weights in files; and those missing in files.

    Of tied weights, the first is written, under whichever of their names the files have. Weights that transformers
    splits or fuses while loading, such as experts, keep their names in transformers.
    """
    described = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    original = revert_weight_conversion(model, dict(described))
    renamed = {id(tensor): name for name, tensor in original.items()}
    converted = {name for name, tensor in described.items() if id(tensor) not in renamed}
    kept = {id(tensor) for tensor in described.values()}
    if not all(name in stored for name, tensor in original.items() if id(tensor) not in kept):
        converted = set()
    names: dict[str, str] = {}
    unnamed = []
    for same in _tied(model):
        candidates = [each for name in same for each in (renamed.get(id(described[name]), name), name)]
        shape = described[same[0]].shape
        there = [each for each in candidates if each in stored and stored[each].shape == shape]
        if there or same[0] in converted:
            names[same[0]] = there[0] if there else same[0]
        else:
            unnamed.append(same[0])
    return names, {*described, *original}, unnamed


def _tied(model: PreTrainedModel) -> list[list[str]]:
    """Return the names of each weight, with all tied names together."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())
