"""Models of the Hugging Face hub, in huggingface_hub's own cache: `Qwen/Qwen3-0.6B`, or `Qwen/Qwen3-0.6B@REVISION`.

Where the cache and the hub are, and who may read there, is set by huggingface_hub's variables (HF_HOME, HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # httpx's, or httpx2's from its version 2 on
    LocalEntryNotFoundError,
)
from tqdm.auto import tqdm

from treadle.core.errors import ConfigError, DownloadError

# What transformers loads without running code. Below the top there are other formats and copies of the weights.
_WEIGHTS, _OTHERS = ["*.safetensors"], ["*.json", "*.jinja"]
_UNWANTED = ["*/*.json", "*/*.safetensors", "consolidated*"]


def hub_directory(name: str, setting: str, weights: bool = True) -> Path:
    """Return the directory of a model in the cache, downloaded if it is not there in whole. Raises as `download`.

    What is in the cache is taken as it is, so that a run and its resumption have the same model. weights: without them
    it is the directory of a tokenizer.
    """
    try:
        return _snapshot(name, weights, local_files_only=True)
    except LocalEntryNotFoundError:
        return download(name, setting, weights)
    except HFValidationError as error:
        raise ConfigError(f"{setting}: no directory {name!r}, and no name of the hub: {error}") from error


def download(name: str, setting: str, weights: bool = True) -> Path:
    """Download what the cache lacks of a model, with a progress bar on standard error; return its directory.

    Raises ConfigError, naming the setting, for a model that the hub does not give; DownloadError without a network.
    """
    try:
        return _snapshot(name, weights, tqdm_class=tqdm)  # huggingface_hub's own bars are switched off by the commands
    except HFValidationError as error:
        raise ConfigError(f"{setting}: no name of the hub: {error}") from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{setting}: {name!r} is neither a directory nor a model that the hub gives: {str(error).splitlines()[0]}; "
            "check the name, and HF_TOKEN for one that is private or gated"
        ) from error
    except (OSError, HTTPError) as error:
        is_offline = "nothing is downloaded while HF_HUB_OFFLINE is set, as it is in a dry run"
        why = is_offline if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise DownloadError(
            f"{setting}: {name!r} is not in the cache {constants.HF_HUB_CACHE} (HF_HUB_CACHE), and {why}; run "
            f"`treadle models get {name}` where it can be reached and bring the cache here, or give a model directory"
        ) from error


def _snapshot(name: str, weights: bool, **options: Any) -> Path:
    repository, _, revision = name.partition("@")
    wanted = [*_OTHERS, *(_WEIGHTS if weights else [])]
    found = snapshot_download(
        repository, revision=revision or None, allow_patterns=wanted, ignore_patterns=_UNWANTED, **options
    )
    return Path(str(found))
