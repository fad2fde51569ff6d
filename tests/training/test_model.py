"""A model that cannot be trained is refused with its reason before anything starts."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import VOCABULARY, same_bits, tiny, weights_of
from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.files import MANIFEST
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.models.model_files import tokenizer_directory
from treadle.training.checkpoint import export_model

TOKENIZER = Path(str(files("treadle.recipes") / "tokenizer"))
SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def built(**fields: Any) -> ModelConfig:
    return ModelConfig(build={**SMALL, **fields}, tokenizer="demo")


def test_a_built_model_is_a_function_of_the_seed() -> None:
    state = torch.random.get_rng_state()
    one, two, other = (make_model(built(), VOCABULARY, seed) for seed in (1, 1, 2))
    assert same_bits(weights_of(one), weights_of(two)) and not same_bits(weights_of(one), weights_of(other))
    assert one.config.vocab_size == VOCABULARY and one.dtype is torch.float32
    assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's draws move


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen33"}, r"knows no model_type 'qwen33'; did you mean 'qwen3'\?"),
        ({"model_type": "vit"}, "model.build: model_type 'vit' is not a causal language model"),
        ({"model_type": "qwen3_moe", "head_dims": 8}, r"model.build: qwen3_moe knows no \['head_dims'\]"),
        ({"hiden_size": 8}, r"model.build: qwen3 knows no \['hiden_size'\]"),
        ({"hidden_size": "8"}, "model.build: .*hidden_size"),
        ({"layer_types": ["full_attention"] * 2}, "model.build: .*layer_types"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1; set it to 0"),
        ({"vocab_size": 31}, "vocabulary of 31 is smaller than the tokenizer's 32"),
    ],
)
def test_a_build_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_model(built(**fields), VOCABULARY, 0)


def exported(tmp_path: Path) -> Path:
    """A model directory like anybody's: it has no manifest."""
    export_model(tmp_path / "model", tiny(), TOKENIZER)
    (tmp_path / "model" / MANIFEST).unlink()
    return tmp_path / "model"


def loading(path: Path) -> ModelConfig:
    return ModelConfig(path=str(path))


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: no directory .*nowhere"):
        make_model(loading(tmp_path / "nowhere"), VOCABULARY, 0)


def test_a_model_without_its_weights_file_is_refused(tmp_path: Path) -> None:
    path = exported(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.path: .*model"):
        make_model(loading(path), VOCABULARY, 0)


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path, damage: str) -> None:
    """transformers would fill the gaps with random numbers and go on."""
    path = exported(tmp_path)
    config = json.loads((path / "config.json").read_text())
    change: dict[str, dict[str, Any]] = {
        "missing": {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
        "shape": {"intermediate_size": 20},
    }
    (path / "config.json").write_text(json.dumps({**config, **change[damage]}))
    with pytest.raises(ConfigError, match=r"model.path: .* lack .* for example model\.layers"):
        make_model(loading(path), VOCABULARY, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of model.path and model.build"),
        ({"path": "x", "build": SMALL}, "exactly one of model.path and model.build"),
        ({"build": {"hidden_size": 8}, "tokenizer": "demo"}, "model.build needs model_type"),
        ({"build": SMALL}, "model.build needs model.tokenizer"),
    ],
)
def test_a_model_has_one_source(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(ModelConfig, fields)


def test_tokenizers(tmp_path: Path) -> None:
    assert tokenizer_directory(built()) == TOKENIZER
    with pytest.raises(ConfigError, match=r"model\.path: no tokenizer\.json in .*nothing"):
        tokenizer_directory(ModelConfig(path=str(tmp_path / "nothing")))


def test_fields_have_the_names_that_the_architecture_accepts() -> None:
    """`num_experts` is another name of a field of Qwen 3 MoE's, `head_dim` is read by its code alone."""
    build = {"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 1, "num_experts": 4, "head_dim": 8}
    more = {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    model: Any = make_model(ModelConfig(build={**build, **more}, tokenizer="demo"), VOCABULARY, 0)
    assert (model.config.num_experts, model.config.head_dim) == (4, 8)
    assert model.model.layers[0].self_attn.q_proj.out_features == 16
