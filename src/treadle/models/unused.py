"""Parts of a model's directory that a run ignores, reported so that no one has to find out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.models.config import ModelConfig
from treadle.models.model_files import ADAPTER_CONFIG, GENERATION_CONFIG, base_directory, read_generation_config
from treadle.models.vision import SEEING

_TOWER = re.compile(r"(vision|visual|image|video|audio|speech)\w*_config")
_SEES = re.compile(r"(vision|visual|image)\w*_config")
_NEUTRAL: Mapping[str, float] = {
    "temperature": 1,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "top_h": 1,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "length_penalty": 1,
    "exponential_decay_length_penalty": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": 0,
    "suppress_tokens": 0,
    "begin_suppress_tokens": 0,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 0,
    "sequence_bias": 0,
    "watermarking_config": 0,
}
"""Settings of generation_config.json that affect sampling, with their neutral values."""


def unused_parts(config: ModelConfig, sampling: Mapping[str, float]) -> list[str]:
    """Return a line for each unused part of the model's directory: an adapter, towers, sampling settings.

    sampling: the run's sampling settings, by names of generation_config.json. Raises ConfigError as `base_directory`.
    """
    if config.build is not None:
        return []
    directory = base_directory(config)
    lines = []
    if (directory / ADAPTER_CONFIG).is_file() and config.adapter != str(directory):
        lines.append(f"the adapter beside the model ({ADAPTER_CONFIG}); to use it, give it as model.adapter")
    content = _read(directory / "config.json")
    towers = sorted(name for name, part in content.items() if part and _TOWER.fullmatch(name))
    if content.get("model_type") in SEEING:
        towers = [name for name in towers if not _SEES.fullmatch(name)]
    if towers:
        kept = "; checkpoints and exports keep it unchanged" if content.get("text_config") else ""
        lines.append(f"the model's parts for input other than text ({', '.join(towers)}){kept}")
    declared = read_generation_config(directory)
    others = [f"{name} {declared[name]}" for name in _NEUTRAL if _matters(name, declared.get(name), sampling)]
    if others:
        lines.append(f"{', '.join(others)} of {GENERATION_CONFIG}; `rollout` sets a run's sampling")
    return lines


def _matters(name: str, value: Any, sampling: Mapping[str, float]) -> bool:
    return value not in (None, [], {}) and value not in (_NEUTRAL[name], sampling.get(name))


def _read(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes())
    return content if isinstance(content, dict) else {}
