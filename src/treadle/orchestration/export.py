"""A checkpoint as a plain model directory, also while its run goes on."""

from __future__ import annotations

from pathlib import Path

from treadle.core.errors import CheckpointError
from treadle.models.loading import load_tokenizer
from treadle.models.model_files import tokenizer_directory
from treadle.orchestration.store.checkpoint_retention import read_checkpoint
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.rendering.chat import ChatRenderer
from treadle.training.checkpoint import export_files, read_model_files


def export_checkpoint(run: Path, directory: Path, which: str = "latest") -> Path:
    """Write weights, config, tokenizer and chat template of a run's checkpoint; returns the checkpoint.

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
    export_files(directory, files.items())
    return checkpoint.directory
