"""Loading the causal language model in a directory, completely and without running its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from treadle.core.errors import ConfigError
from treadle.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, names_code
from treadle.models.multimodal import is_multimodal, keep_language_part, keep_names, keep_whole


def load_pretrained(
    directory: Path, field: str, gguf_file: str | None = None, weights: bool = True, whole: bool = False
) -> PreTrainedModel:
    """Return the causal LM in a directory, in float32. gguf_file: name of a GGUF file in the directory with the model.

    A model with towers is reduced to its language part (`models.multimodal`), unless `whole`. weights: as for
    `make_model`.
    Raises ConfigError, naming the setting, if it cannot be loaded or lacks some of the model's weights, and for `whole`
    without towers.
    """
    path = str(directory)
    hf_logging.disable_progress_bar()  # callers show their own progress
    try:
        with _without_adapter(directory) as files:
            more = gguf_file is None and is_multimodal(
                AutoConfig.from_pretrained(str(files), local_files_only=True, trust_remote_code=False)
            )
            loaded: Any = (AutoModelForMultimodalLM if more else AutoModelForCausalLM).from_pretrained(
                str(files),
                gguf_file=gguf_file,
                device_map=None if weights else "meta",
                dtype=torch.float32,
                output_loading_info=True,
                # Reported below, like missing weights.
                ignore_mismatched_sizes=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, SafetensorError, StrictDataclassError) as error:
        if gguf_file is None and names_code(directory / "config.json"):
            raise ConfigError(
                f"{field}: the model in {path!r} brings its own code (auto_map in config.json), which is "
                "never run; use an architecture of transformers, or register its classes from Python "
                "(AutoConfig.register, AutoModelForCausalLM.register)"
            ) from error
        raise ConfigError(f"{field}: {gguf_file or path!r} cannot be loaded: {error}") from error
    model: PreTrainedModel = loaded[0]
    model.name_or_path = model.config.name_or_path = path
    report: dict[str, Any] = loaded[1]
    if wrong := sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])]):
        raise ConfigError(
            f"{field}: the weights in {path!r} lack {len(wrong)} of the model's, for example {wrong[0]}, and they "
            "would be random; get the directory again, with all its files"
        )
    if whole and not more:
        raise ConfigError(f"training.vision is 'train', but the model in {path!r} sees no images; leave it out")
    if more and whole:
        keep_whole(model, directory, field)
    elif more:
        keep_language_part(model, directory, field)
    elif gguf_file is None:
        keep_names(model, directory)
    return model


@contextmanager
def _without_adapter(directory: Path) -> Iterator[Path]:
    """Yield the directory, or links to its files if there is an adapter beside the model: transformers would add it."""
    if not (directory / ADAPTER_CONFIG).is_file():
        yield directory
        return
    with TemporaryDirectory(prefix="treadle-model-") as folder:
        for file in directory.iterdir():
            if file.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                (Path(folder) / file.name).symlink_to(file.absolute())
        yield Path(folder)
