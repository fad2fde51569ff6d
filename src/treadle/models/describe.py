"""Descriptions of a model's directory: its kind, its trained parts, and the parts that are only kept."""

from __future__ import annotations

import json
from pathlib import Path

from treadle.models.model_files import ADAPTER_CONFIG, is_adapter, require_model
from treadle.models.pretrained import load_pretrained
from treadle.models.support import context_of, why_not_packable
from treadle.models.weights import rest_of


def describe_model(name: str, setting: str) -> list[tuple[str, str]]:
    """Return rows (name, description) about a model or adapter, without reading weights. name: as for `model.path`.

    Raises ConfigError, naming the setting, if it is not a model, or cannot be loaded.
    """
    if is_adapter(Path(name)):
        settings = json.loads((Path(name) / ADAPTER_CONFIG).read_bytes())
        return [
            ("kind", f"a LoRA adapter of rank {settings['r']}, for model.adapter"),
            ("base", settings["base_model_name_or_path"] or "not named"),
        ]
    model = load_pretrained(require_model(name, setting), setting, weights=False)
    text, rest = model.config.get_text_config(), rest_of(model)
    of_text = f"{sum(p.numel() for p in model.parameters()):,} weights, context {context_of(text):,}"
    rows = [("kind", f"{type(model).__name__} ({model.config.model_type})"), ("language model", f"{of_text}; trained")]
    if rest:
        size = sum(tensor.nbytes for tensor in rest.values()) / 1e6
        rows.append(("the rest", f"{len(rest)} tensors, {size:,.1f} MB; in every checkpoint and export as they are"))
    reason = why_not_packable(model.config)
    rows.append(("prefixes", "shared by calls that have them in common" if reason is None else f"not shared: {reason}"))
    return rows
