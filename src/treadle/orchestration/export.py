"""A checkpoint as a plain model directory, also while its run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from treadle.core.errors import CheckpointError, ConfigError
from treadle.models.config import ModelConfig
from treadle.models.loading import load_tokenizer
from treadle.models.model_files import ADAPTER_CONFIG, tokenizer_directory
from treadle.orchestration.store.checkpoint_retention import read_checkpoint
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.rendering.chat import ChatRenderer
from treadle.training.checkpoint import export_files, export_model, read_model_files
from treadle.training.make import load_model


def export_checkpoint(run: Path, directory: Path, which: str = "latest", merge: bool = False) -> Path:
    """Write weights, config, tokenizer and chat template of a run's checkpoint; returns the checkpoint.

    merge: an adapter is added to its base, so that the result is a whole model.
    which: a name, `latest` or `best`. If the run removes the checkpoint meanwhile, the one that is now the latest or
    best is taken. Raises RunError if there is none of that name (any more), DamageError if it is damaged,
    CheckpointError if the directory exists or the disk refuses, ConfigError if a configured chat template is missing.
    """
    if directory.exists():
        raise CheckpointError(f"{str(directory)!r} exists already; choose another directory")
    config = RunDirectory.open(run).config()
    checkpoint, files = read_checkpoint(run, which, read_model_files)
    if config.model.chat_template is not None:
        tokenizer = load_tokenizer(tokenizer_directory(config.model))
        renderer = ChatRenderer(tokenizer, (), chat_template=config.model.chat_template)
        files = {name: content for name, content in files.items() if not name.startswith("additional_chat_templates/")}
        files["chat_template.jinja"] = renderer.source.encode()
    if merge:
        if ADAPTER_CONFIG not in files:
            raise ConfigError(f"--merge: {checkpoint.directory} is a whole model already; leave it out")
        _export_merged(directory, config.model, config.seed, checkpoint.directory, files)
    else:
        export_files(directory, files.items())
    return checkpoint.directory


def _export_merged(directory: Path, config: ModelConfig, seed: int, adapter: Path, files: Mapping[str, bytes]) -> None:
    model = load_model(config.model_copy(update={"adapter": str(adapter)}), seed)
    template = {name: files[name] for name in ("chat_template.jinja",) if name in files}
    export_model(directory, model, adapter, template)
