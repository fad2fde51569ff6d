"""docs/models.md: what each family of models can do, as the code says it."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models import FAMILIES, HYBRIDS, MORE_FAMILIES, ROW_FAMILIES, tiny
from tests.rollout.families import TODAY, World, small_vocabulary
from tests.training.test_families import end_breaks, thought_breaks, thoughts, tools_of
from tests.worlds import ROOT
from treadle.engines.torch.floor import RowModel, engine_model
from treadle.models.lora import target_names
from treadle.training.forward import Forward

HEAD = "| family | layers | prefixes | sampled in process | adapters beside the usual |"
USUAL = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
KINDS = {"full_attention": "attention", "sliding_attention": "sliding window", "hybrid": "attention beside mamba"}


def table() -> str:
    every = {**FAMILIES, **MORE_FAMILIES, **HYBRIDS, **ROW_FAMILIES}
    rows: dict[str, str] = {}
    for family, fields in every.items():
        rows.setdefault(f"{fields['model_type']} {layers(family)}", row(family, fields["model_type"]))
    return "\n".join([HEAD, "|---" * HEAD.count(" | ") + "|---|", *rows.values()])


def row(family: str, model_type: str) -> str:
    model = tiny(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forward = Forward(model, 64)
    prefixes = "shared" if forward.shares else f"rows: {forward.scorer.why_not_shared}"
    names = ", ".join(name for name in target_names(model, "all-linear") if name not in USUAL)
    return f"| {model_type} | {layers(family)} | {prefixes} | {sampled(model)} | {names} |"


def layers(family: str) -> str:
    text: Any = tiny(family).config.get_text_config()
    named = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kinds = named or ["sliding_attention" if window else "full_attention"]
    return ", ".join(dict.fromkeys(KINDS.get(kind, kind.replace("_", " ")) for kind in kinds))


def sampled(model: Any) -> str:
    served = engine_model(model, torch.float32, 64, routing=False, device=None)
    if not isinstance(served, RowModel):
        return "in batches"
    return "one by one" if served.keeps else "one by one, anew for each token"


CHAT = "| model | tools | thoughts | what breaks |"


def chat_table() -> str:
    return "\n".join([CHAT, "|---|---|---|---|", *(chat_row(name) for name in TODAY)])


def chat_row(name: str) -> str:
    renderer = World(TODAY[name], small_vocabulary()).renderer
    breaks = ", ".join(dict.fromkeys([*thought_breaks(renderer), *end_breaks(renderer)])) or "-"
    offered = tools_of(renderer) if TODAY[name].tools else "-"
    return f"| {name} | {offered} | {thoughts(renderer)} | {breaks} |"


@pytest.mark.parametrize("make", [table, chat_table])
def test_the_page_has_the_tables_of_models(make: Callable[[], str]) -> None:
    assert make() in (ROOT / "docs" / "models.md").read_text(), "run python -m tests.training.test_models_table"


if __name__ == "__main__":
    print(table(), chat_table(), sep="\n\n")
