"""Runs with models that neither share prefixes nor use the engine's cache: slower, said once, and as any other."""

import json
import warnings
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.runs import check_finished, start, updates
from tests.worlds import tiny
from treadle.api.train import dry_run
from treadle.models.support import context_of

BLOOM = {"model_type": "bloom", "n_head": 2, "n_layer": 1, "hidden_size": 32}
JAMBA = {
    "model_type": "jamba",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 1,
    "mamba_d_state": 4,
}
REASONS = {"bloom": "1 of 1 layers of BloomForCausalLM did not read the engine's cache", "jamba": "its Mamba layers"}


@pytest.mark.parametrize(
    ("build", "own_process"),
    [(BLOOM, False), (JAMBA, False), pytest.param(JAMBA, True, marks=pytest.mark.slow)],
    ids=["bloom", "jamba", "jamba in a process of its own"],
)
def test_it_trains_and_says_once_why_it_is_slower(build: dict[str, object], own_process: bool, tmp_path: Path) -> None:
    settings = [f"model.build={json.dumps(build)}", f"engine.own_process={json.dumps(own_process)}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        start(tmp_path / "run", "orchestration.updates=2", *settings)
    check_finished(tmp_path / "run")
    assert [row["logprob_gap_max"] < 1e-5 for row in updates(tmp_path / "run")] == [True, True]
    said = [str(w.message) for w in caught]
    assert sum("is sampled call by call" in text and REASONS[str(build["model_type"])] in text for text in said) == 1
    assert sum("cannot share prefixes" in text for text in said) == 1


def test_a_dry_run_says_so_too(tmp_path: Path) -> None:
    found = dry_run(tiny(f"model.build={json.dumps(JAMBA)}"), tmp_path, lambda line: None)
    told = {check.name: check.text for check in found.checks}
    assert f"at once; call by call, which is slower: {REASONS['jamba']}" in told["engine"]
    assert f"trained with packing 'step': {REASONS['jamba']}" in told["model"]


def test_a_model_that_names_no_context_has_one() -> None:
    assert {context_of(AutoConfig.for_model(name)) for name in ("bloom", "mamba", "mamba2", "xlstm")} == {2**20}
    assert context_of(AutoConfig.for_model("qwen3", max_position_embeddings=7)) == 7
