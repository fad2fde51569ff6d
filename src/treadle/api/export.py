"""A checkpoint as a plain model directory, even of a live run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.api.model_card import CARD, model_card
from treadle.core.errors import ConfigError
from treadle.models.config import ModelConfig
from treadle.models.model_files import ADAPTER_CONFIG, is_adapter, tokenizer_directory
from treadle.plan.config import config_of
from treadle.record.address import RunAddress, find_address
from treadle.record.checkpoint_retention import checkpoint_update, read_checkpoint
from treadle.record.run_directory import JsonLog, RunDirectory
from treadle.rendering.chat import ChatRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export_checkpoint(run: str | Path, directory: Path, merge: bool = False, dtype: str | None = None) -> Path:
    """Write weights, config, tokenizer, chat template and model card of a run's checkpoint; return the checkpoint.

    run: `RUN`, `RUN@best` or `RUN@40`, or the directory of an adapter to merge. merge: whether to merge an adapter
    into its base, for a whole model.
    dtype: dtype of the weights, such as `bfloat16`; default: as trained.
    If the run removes the checkpoint meanwhile, the new latest or best one is used. Raises RunError if there is none
    of that name, DamageError if it is damaged, CheckpointError if the disk refuses,
    ConfigError if the directory exists, a configured chat template is missing or a weight does not fit the dtype.
    """
    if directory.exists():
        raise ConfigError(f"{str(directory)!r} exists already; choose another directory")
    if is_adapter(Path(run)):
        _merge_adapter(Path(run), directory, merge, dtype)
        return Path(run)
    address = find_address(run) or RunAddress(Path(run))
    # Fails early, before torch is loaded.
    address.model()
    from treadle.models.chat import load_tokenizer
    from treadle.training.checkpoint import export_files, export_model, read_model_files

    place = RunDirectory.open(address.run)
    config = config_of(place)
    checkpoint, files = read_checkpoint(address.run, address.checkpoint, read_model_files)
    if config.model.chat_template is not None:
        tokenizer = load_tokenizer(tokenizer_directory(config.model))
        renderer = ChatRenderer(tokenizer, (), chat_template=config.model.chat_template)
        files = {name: content for name, content in files.items() if not name.startswith("additional_chat_templates/")}
        files["chat_template.jinja"] = renderer.source.encode()
    rows = JsonLog.read(place.metrics_file).rows
    whole = {name: content for name, content in files.items() if name != ADAPTER_CONFIG} if merge else files
    card = model_card(config, rows, checkpoint_update(checkpoint.directory), whole)
    if merge:
        if ADAPTER_CONFIG not in files:
            raise ConfigError(f"--merge: {checkpoint.directory} is a whole model already; leave it out")
        model = _merged(config.model, checkpoint.directory, dtype)
        template = {name: files[name] for name in ("chat_template.jinja",) if name in files}
        export_model(directory, model, checkpoint.directory, {**template, CARD: card})
    else:
        export_files(directory, {**(files if dtype is None else _converted(files, dtype)), CARD: card}.items())
    return checkpoint.directory


def _converted(files: Mapping[str, bytes], dtype: str) -> dict[str, bytes]:
    """Return the files with weights in another dtype."""
    import torch
    from safetensors.torch import load, save

    converted = dict(files)
    for name in files:
        if name.endswith(".safetensors"):
            weights = load(files[name])
            for key, tensor in weights.items():
                if tensor.is_floating_point():
                    weights[key] = tensor.to(getattr(torch, dtype))
                    if not weights[key].isfinite().all() and tensor.isfinite().all():
                        raise ConfigError(f"--dtype {dtype} cannot hold all of {key}; take bfloat16 or float32")
            converted[name] = save(weights, {"format": "pt"})
    if "config.json" in files:
        converted["config.json"] = json.dumps(json.loads(files["config.json"]) | {"dtype": dtype}, indent=2).encode()
    return converted


def _merged(config: ModelConfig, adapter: Path, dtype: str | None) -> PreTrainedModel:
    import torch

    from treadle.models.weights import convert_rest
    from treadle.training.make import load_model

    model = load_model(config.model_copy(update={"adapter": str(adapter)}), seed=0)
    if dtype is not None:
        model.to(getattr(torch, dtype))
        convert_rest(model, getattr(torch, dtype))
    return model


def _merge_adapter(adapter: Path, directory: Path, merge: bool, dtype: str | None) -> None:
    if not merge:
        raise ConfigError(f"{str(adapter)!r} is an adapter in peft's format already; copy it, or add --merge")
    from treadle.training.checkpoint import export_model

    export_model(directory, _merged(ModelConfig(adapter=str(adapter)), adapter, dtype), adapter)
