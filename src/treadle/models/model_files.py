"""Location and presence of the files of a configured model. Needs no torch."""

from __future__ import annotations

import difflib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from treadle.core.errors import ConfigError
from treadle.models.config import ModelConfig
from treadle.models.model_cache import PACKAGED, converted_directory, is_convertible

SHIPPED_TOKENIZERS = {
    "demo": "tokenizer",
    "sql-small": "sql_tokenizer",
    "search-small": "search_tokenizer",
    "tools-small": "tools_tokenizer",
    "look-small": "look_tokenizer",
}
"""Special names for `model.tokenizer` -> directories of `treadle.recipes`."""

GENERATION_CONFIG = "generation_config.json"
ADAPTER_WEIGHTS, ADAPTER_CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")


def check_model_files(config: ModelConfig) -> None:
    """Raise ConfigError if a directory or file named by the section is missing."""
    if config.build is None:
        base_directory(config)
    tokenizer_directory(config)
    require_template(config.chat_template, "model.chat_template")


def is_adapter(directory: Path) -> bool:
    """Return whether a directory is an adapter's; one beside a whole model is not used."""
    return (directory / ADAPTER_CONFIG).is_file() and not any(directory.glob("model*.safetensors"))


def require_model_or_adapter(name: str, setting: str) -> Path:
    """Return the directory of a model, as `require_model`, or of an adapter, unchanged."""
    return Path(name) if is_adapter(Path(name)) else require_model(name, setting)


def located(directory: Path, base: str | None = None) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for the model or adapter in a directory.

    base: base of an adapter; default: the one it names.
    """
    if is_adapter(directory):
        return {"adapter": str(directory), "path": base, "build": None}
    return {"adapter": None, "path": str(directory), "build": None}


def base_directory(config: ModelConfig) -> Path:
    """Return the directory of the configured model, without its adapter. Raises as `require_model`."""
    if config.adapter is not None and not (Path(config.adapter) / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"model.adapter: no {ADAPTER_CONFIG} in {config.adapter!r}; give the directory of an adapter")
    if config.path is not None:
        return require_model(config.path, "model.path")
    settings = json.loads((Path(config.adapter or "") / ADAPTER_CONFIG).read_bytes())
    if not (name := settings.get("base_model_name_or_path")):
        raise ConfigError(f"model.adapter: {config.adapter!r} names no base; set model.path to the model it belongs to")
    return require_model(name, "model.adapter: its base")


def require_model(name: str, setting: str) -> Path:
    """Return the directory of a model: on disk, or already converted (`model_cache`), or from the hub (`hub`).

    A model of the hub is downloaded unless cached. Raises ConfigError, naming the setting, if there is none;
    DownloadError
    if the hub cannot be reached.
    """
    path = Path(name)
    if (path / "config.json").is_file() and not is_adapter(path):
        return path
    if (path / "config.yaml").is_file():
        checkpoints = sorted(path.glob("checkpoints/step-*"))
        such_as = f"take one of its checkpoints, such as {checkpoints[-1]}" if checkpoints else "it has no checkpoint"
        raise ConfigError(f"{setting}: {name!r} is a run; {such_as}, or an export of it (`treadle export`)")
    if is_adapter(path):
        raise ConfigError(f"{setting}: {name!r} is the directory of an adapter; give it as model.adapter")
    if path.is_dir():
        raise ConfigError(f"{setting}: no config.json in {name!r}; give the directory of a Hugging Face causal LM")
    if is_convertible(name):
        directory = converted_directory(name)
        if not directory.is_dir():
            raise ConfigError(f"{setting}: {name!r} is not in the cache yet; run: treadle models get {name}")
        return directory
    if is_hub_name(name):
        # huggingface_hub comes with an extra.
        from treadle.models.hub import hub_directory

        return hub_directory(name, setting)
    if name.startswith("~"):
        raise ConfigError(f"{setting}: no directory {name!r}; ~ is not expanded here; write the whole path")
    what = "file" if name.endswith(".gguf") else "directory"
    raise ConfigError(
        f"{setting}: no {what} {name!r}; {_meant(name)}give the directory of a Hugging Face causal LM, a GGUF file, a "
        f"hub's ORG/NAME or one of {', '.join(PACKAGED)}"
    )


def _meant(name: str) -> str:
    """Return `did you mean 'models/sums'? ` for a similarly named model in the same directory, or ""."""
    path = Path(name)
    models = [config.parent.name for config in path.parent.glob("*/config.json")]
    models += [*(file.name for file in path.parent.glob("*.gguf")), *(PACKAGED if path.name == name else ())]
    near = difflib.get_close_matches(path.name, models, n=1)
    return f"did you mean {str(path.with_name(near[0]))!r}? " if near else ""


def is_hub_name(name: str) -> bool:
    """Return whether a name may be a model's on a hub; if its first part is a directory here, it is a path."""
    looks_so = _HUB_NAME.fullmatch(name) is not None and not name.endswith(".gguf")
    return looks_so and not Path(name).parent.is_dir()


def require_template(template: str | None, setting: str) -> None:
    """Raise ConfigError, naming the setting, for a missing file; plain names are checked by the tokenizer."""
    if template is not None and ("/" in template or template.endswith(".jinja")) and not Path(template).is_file():
        raise ConfigError(f"{setting}: no file {template!r}; give the file of a chat template, or leave it out")


def tokenizer_directory(config: ModelConfig) -> Path:
    """Return the directory of the configured tokenizer. Raises as `require_model`."""
    if config.tokenizer is None and config.adapter and (Path(config.adapter) / "tokenizer.json").is_file():
        return Path(config.adapter)
    base = str(base_directory(config)) if config.adapter and config.path is None else config.path
    name = config.tokenizer or base or ""
    setting = "model.path" if config.tokenizer is None else "model.tokenizer"
    if name in SHIPPED_TOKENIZERS:
        return Path(str(files("treadle.recipes") / SHIPPED_TOKENIZERS[name]))
    directory = Path(name)
    if not (directory / "tokenizer.json").is_file() and is_convertible(name):
        directory = require_model(name, setting)
    elif not directory.is_dir() and is_hub_name(name):
        # huggingface_hub comes with an extra.
        from treadle.models.hub import hub_directory

        directory = hub_directory(name, setting, weights=config.tokenizer is None)
    if not (directory / "tokenizer.json").is_file():
        if config.tokenizer is None:
            raise ConfigError(
                f"model.path: no tokenizer.json in {name!r}; add it, or set model.tokenizer to a directory that has one"
            )
        raise ConfigError(f"model.tokenizer: no tokenizer.json in {name!r}; give a directory that has one, or 'demo'")
    return directory


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Return a model directory's generation_config.json; {} without one. Raises ConfigError."""
    file = directory / GENERATION_CONFIG
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected an object, found {type(data).__name__}")
    return data


def names_code(file: Path) -> bool:
    """Return whether a model's or tokenizer's JSON requests Python code from its directory or a hub."""
    try:
        return "auto_map" in json.loads(file.read_bytes())
    except (OSError, ValueError, TypeError):  # missing, or without such entries
        return False
