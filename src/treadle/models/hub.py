"""Models of the Hugging Face hub, in huggingface_hub's own cache: `Qwen/Qwen3-0.6B`, or `Qwen/Qwen3-0.6B@REVISION`.

huggingface_hub's variables set the cache, the hub and its access (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # httpx's, or httpx2's from its version 2 on
    LocalEntryNotFoundError,
)
from tqdm.auto import tqdm

from treadle.core.errors import ConfigError, DownloadError

# Files that transformers loads without running code. Subdirectories contain other formats and copies of the weights.
_WEIGHTS, _OTHERS = ["*.safetensors"], ["*.json", "*.jinja"]
_UNWANTED = ["*/*.json", "*/*.safetensors", "consolidated*"]


def hub_directory(name: str, setting: str, weights: bool = True) -> Path:
    """Return the directory of a model in the cache, downloaded unless it is complete. Raises as `download`.

    Cached files are used unchanged, so that a run and its resumption have the same model. weights: whether to include
    weights; without them, the directory only serves as a tokenizer's.
    """
    try:
        cached = _snapshot(name, weights, local_files_only=True)
    except LocalEntryNotFoundError:
        return download(name, setting, weights)
    except HFValidationError as error:
        raise ConfigError(f"{setting}: no directory {name!r}, and not a valid name on the hub: {error}") from error
    return download(name, setting, weights) if _missing(cached, weights) else cached


def download(name: str, setting: str, weights: bool = True) -> Path:
    """Download the missing parts of a model, with a progress bar on standard error; return its directory.

    Raises ConfigError, naming the setting, if the hub does not provide the model; DownloadError without a network, also
    if the cache has part of the model.
    """
    try:
        # The commands switch off huggingface_hub's own bars.
        directory = _snapshot(name, weights, tqdm_class=tqdm)
    except HFValidationError as error:
        raise ConfigError(f"{setting}: not a valid name on the hub: {error}") from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{setting}: {name!r} is neither a directory nor available on the hub: {str(error).splitlines()[0]}; "
            "check the name, and HF_TOKEN for one that is private or gated"
        ) from error
    except (OSError, HTTPError) as error:
        is_offline = "nothing is downloaded in a dry run or with HF_HUB_OFFLINE"
        why = is_offline if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise DownloadError(
            f"{setting}: no directory and no cached model {name!r}, and {why}; give a model directory, or run "
            f"`treadle models get {name}` where the hub can be reached (cache: {constants.HF_HUB_CACHE}, HF_HUB_CACHE)"
        ) from error
    # Without a network, huggingface_hub returns whatever is cached.
    if missing := _missing(directory, weights):
        raise DownloadError(
            f"{setting}: {name!r} is only partly in the cache {constants.HF_HUB_CACHE} (HF_HUB_CACHE), without "
            f"{missing}; run `treadle models get {name}` where the hub can be reached, or give a model directory"
        )
    return directory


def upload(directory: Path, name: str, setting: str) -> str:
    """Upload a directory's files as a model on the hub, in one commit; return the commit's address.

    A missing repository is created as private. Raises ConfigError, naming the setting, if the hub refuses;
    DownloadError without a network.
    """
    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        message = f"Upload {directory.name}"
        return str(api.upload_folder(repo_id=name, folder_path=directory, commit_message=message).commit_url)
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(
            f"{setting}: {name!r}: {str(error).splitlines()[0]}; check the name, and HF_TOKEN, which must allow writing"
        ) from error
    except (OSError, HTTPError) as error:
        raise DownloadError(
            f"{setting}: the hub cannot be reached; {directory} is complete, upload it later"
        ) from error


def _missing(directory: Path, weights: bool) -> str | None:
    """Return the missing part of a snapshot; None if complete. `AutoTokenizer` and `AutoConfig` cache only parts."""
    if not weights:
        return None if any(directory.glob("tokenizer*.json")) else "a tokenizer"
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return None if any(directory.glob("*.safetensors")) else "*.safetensors"
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return next((shard for shard in shards if not (directory / shard).is_file()), None)


def _snapshot(name: str, weights: bool, **options: Any) -> Path:
    repository, _, revision = name.partition("@")
    wanted = [*_OTHERS, *(_WEIGHTS if weights else [])]
    path = snapshot_download(
        repository, revision=revision or None, allow_patterns=wanted, ignore_patterns=_UNWANTED, **options
    )
    return Path(str(path))
