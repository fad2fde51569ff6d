"""Where the files of a configured model lie, and whether they are there. Needs no torch."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from treadle.core.errors import ConfigError
from treadle.models.config import ModelConfig

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def check_model_files(config: ModelConfig) -> None:
    """Raise ConfigError if a directory or file that the section names is not there."""
    if config.path is not None:
        require_model(config.path, "model.path")
    tokenizer_directory(config)
    require_template(config.chat_template, "model.chat_template")


def require_model(directory: str, setting: str) -> Path:
    """Return the directory of a model. Raises ConfigError, naming the setting, where there is none."""
    path = Path(directory)
    if (path / "config.json").is_file():
        return path
    if (path / "config.yaml").is_file():
        raise ConfigError(
            f"{setting}: {directory!r} is a run; take one of its checkpoints, such as "
            f"{directory.rstrip('/')}/checkpoints/step-000100, or what `treadle export` makes of it"
        )
    if path.is_dir():
        raise ConfigError(f"{setting}: no config.json in {directory!r}; give the directory of a Hugging Face causal LM")
    raise ConfigError(f"{setting}: no directory {directory!r}; {_download(directory)}")


def require_template(template: str | None, setting: str) -> None:
    """Raise ConfigError, naming the setting, for a file that is not there; plain names are the tokenizer's to check."""
    if template is not None and ("/" in template or template.endswith(".jinja")) and not Path(template).is_file():
        raise ConfigError(f"{setting}: no file {template!r}; give the file of a chat template, or leave it out")


def tokenizer_directory(config: ModelConfig) -> Path:
    """Return the directory of the configured tokenizer. Raises ConfigError if it is not there."""
    name = config.tokenizer or config.path or ""
    directory = Path(str(files("treadle.recipes") / "tokenizer")) if name == "demo" else Path(name)
    if not (directory / "tokenizer.json").is_file():
        if config.tokenizer is None:
            raise ConfigError(
                f"model.path: no tokenizer.json in {name!r}; add it, or set model.tokenizer to a directory that has one"
            )
        raise ConfigError(f"model.tokenizer: no tokenizer.json in {name!r}; give a directory that has one, or 'demo'")
    return directory


def _download(directory: str) -> str:
    """What to do about a directory that is not there, which may be meant as the name of a model on a hub."""
    if directory.startswith("~"):
        return "~ is not expanded here; write the whole path"
    if not _HUB_NAME.fullmatch(directory) or Path(directory).parent.is_dir():
        return "give that of a Hugging Face causal LM"
    folder = f"models/{directory.rpartition('/')[2]}"
    return f"models are not downloaded: `hf download {directory} --local-dir {folder}`, then give {folder}"
