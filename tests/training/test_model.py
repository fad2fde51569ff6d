"""A model that cannot be trained is refused with its reason before anything starts."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_hub import COMMIT, serving_hub
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


WANTED = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
UNWANTED = ("pytorch_model.bin", "modeling_own.py", "onnx/model.safetensors", "README.md", "consolidated.safetensors")
LOOK_UP = """
import sys
from treadle.models.config import ModelConfig
from treadle.models.model_files import require_model, tokenizer_directory
name, what = sys.argv[1:]
if what == "model":
    print(require_model(name, "model.path"))
else:
    print(tokenizer_directory(ModelConfig(build={"model_type": "llama"}, tokenizer=name)))
assert not {"torch", "transformers"} & set(sys.modules)
"""


@dataclass(frozen=True)
class Place:
    """An empty folder with a cache of its own, and a hub."""

    path: Path
    endpoint: str
    asked: list[str]

    def run(self, *words: str, online: bool = True) -> subprocess.CompletedProcess[str]:
        endpoint = self.endpoint if online else "http://127.0.0.1:1"
        ours = {"HF_HOME": str(self.path / "hf"), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.path,
            env={**os.environ, **ours},
            capture_output=True,
            text=True,
            check=False,
        )

    def look_up(self, name: str, what: str = "model", online: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("-c", LOOK_UP, name, what, online=online)

    def treadle(self, *words: str, online: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "treadle.cli.main", *words, online=online)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    served = tmp_path / "served"
    for name in (*WANTED, *UNWANTED):
        (served / name).parent.mkdir(parents=True, exist_ok=True)
        (served / name).write_text(f"content of {name}")
    with serving_hub("acme/tiny", served) as (endpoint, asked):
        yield Place(tmp_path, endpoint, asked)


def held(directory: str) -> set[str]:
    root = Path(directory.strip())
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_a_name_of_the_hub_is_downloaded_once_and_nothing_but_what_is_loaded(place: Place) -> None:
    first = place.look_up("acme/tiny")
    assert first.returncode == 0, first.stderr
    assert "Fetching 4 files" in first.stderr  # a download is never silent
    assert held(first.stdout) == set(WANTED)
    assert COMMIT in first.stdout
    place.asked.clear()
    for name in ("acme/tiny", f"acme/tiny@{COMMIT}"):
        again = place.look_up(name, online=False)
        assert (again.stdout, again.stderr) == (first.stdout, "")
    assert place.asked == []


INDEX = """{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"""


@pytest.mark.parametrize(
    ("cached", "what", "sharded"),
    [
        (("config.json", "tokenizer.json"), "model", False),
        (("config.json", "tokenizer.json"), "model", True),
        (("config.json",), "tokenizer", False),
    ],
)
def test_files_that_transformers_left_in_the_cache_are_no_whole_snapshot(
    place: Place, cached: tuple[str, ...], what: str, sharded: bool
) -> None:
    """As `AutoTokenizer` and `AutoConfig` leave them: files of their own, without the rest of the repository."""
    served = place.path / "served"
    if sharded:
        (served / "model.safetensors").unlink()
        (served / "model.safetensors.index.json").write_text(INDEX)
        for number in (1, 2):
            (served / f"model-{number}.safetensors").touch()
        cached = (*cached, "model.safetensors.index.json", "model-1.safetensors")
    in_cache = place.path / "hf" / "hub" / "models--acme--tiny"
    (in_cache / "refs").mkdir(parents=True)
    (in_cache / "refs" / "main").write_text(COMMIT)
    (in_cache / "snapshots" / COMMIT).mkdir(parents=True)
    for name in cached:
        shutil.copy(served / name, in_cache / "snapshots" / COMMIT)
    offline = place.look_up("acme/tiny", what, online=False)
    assert offline.returncode and "'acme/tiny' is only partly in the cache" in offline.stderr
    found = held(place.look_up("acme/tiny", what).stdout)
    weights = {"model-1.safetensors", "model-2.safetensors"} if sharded else {"model.safetensors"}
    assert "tokenizer.json" in found and (what == "tokenizer" or weights <= found)


def test_without_a_network_the_error_names_the_cache_and_the_key(place: Place) -> None:
    words = ("train", "demo", "model.build=null", "model.path=acme/tiny", "model.tokenizer=null", "warm_start=null")
    failed = place.treadle(*words, online=False)
    [line] = failed.stderr.splitlines()
    assert failed.returncode == 1
    assert line.startswith("error: model.path: no directory and no cached model 'acme/tiny', and")
    assert str(place.path / "hf" / "hub") in line
    assert "treadle models get acme/tiny" in line and "and the hub cannot be reached" in line
    assert place.asked == []


def test_the_command_gets_it_and_a_name_that_the_hub_does_not_have_is_one_line(place: Place) -> None:
    got = place.treadle("models", "get", "acme/tiny")
    assert got.returncode == 0, got.stderr
    assert "train from it: treadle train RECIPE model.path=acme/tiny model.build=null" in got.stdout
    assert held(got.stdout.split("model directory: ")[1].splitlines()[0]) == set(WANTED)
    failed = place.treadle("models", "get", "acme/huge")
    [line] = failed.stderr.splitlines()
    assert failed.returncode == 2
    assert "'acme/huge' is neither a directory nor available on the hub" in line
    assert "HF_TOKEN" in line
