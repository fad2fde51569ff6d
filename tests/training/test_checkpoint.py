"""Checkpoints are complete or absent, continue bit for bit, and say what does not fit."""

import copy
import json
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import FAMILIES, VOCABULARY, random_groups, same_bits, tiny, weights_of
from treadle.algorithms.config import AlgorithmConfig, KlConfig
from treadle.core.errors import CheckpointError, DamageError, RemovedError
from treadle.core.files import MANIFEST, Manifest
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.models.tensor_file import write_tensors
from treadle.models.weights import published, unique_weights, weights_sha256
from treadle.training.checkpoint import (
    checkpoint_bytes,
    copy_weights,
    export_model,
    load_checkpoint,
    remove_others,
    save_checkpoint,
)
from treadle.training.checkpoint_shards import InMemory
from treadle.training.config import OptimizerConfig, TrainingConfig
from treadle.training.frozen import make_reference
from treadle.training.learner import Learner

TOKENIZER = Path(str(files("treadle.recipes") / "tokenizer"))
ROOT = Path(__file__).parents[2]


PLAIN = AlgorithmConfig(entropy_coef=0.1)
KL = AlgorithmConfig(kl=KlConfig(coef=0.3, reset_every=3, target=0.01))
WHOLE = AlgorithmConfig(advantage="gae", kl=KlConfig(coef=0.3))


def make_learner(family: str = "qwen3", seed: int = 0, algorithm: AlgorithmConfig = PLAIN, **fields: Any) -> Learner:
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup=3, weight_decay=0.01, decay_from=0.5)
    training = TrainingConfig(optimizer=optimizer, updates_per_batch=2)
    model = tiny(family, seed, **fields)
    return Learner(model, training, algorithm, updates=8, reference=make_reference(algorithm.kl, model))


def train(learner: Learner, *seeds: int) -> Learner:
    for seed in seeds:
        learner.train_batch(random_groups(seed, groups=4))
    return learner


def saved(directory: Path, learner: Learner | None = None) -> Path:
    save_checkpoint(directory / "step-1", learner or train(make_learner(), 0), TOKENIZER)
    return directory / "step-1"


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("family", "algorithm"),
    [("qwen3", PLAIN), ("qwen3-untied", PLAIN), ("gemma3-half-sliding", PLAIN), ("qwen3", WHOLE), ("qwen3", KL)],
)
def test_a_restored_learner_continues_bit_for_bit(tmp_path: Path, family: str, algorithm: AlgorithmConfig) -> None:
    """Value head, reference and the coefficient of KL included."""
    learner = train(make_learner(family, algorithm=algorithm), 0, 1)
    checkpoint = saved(tmp_path, learner)
    size = sum(p.stat().st_size for p in checkpoint.glob("*.safetensors"))
    assert 0.8 < checkpoint_bytes(learner) / size < 1.2
    at_save = weights_of(learner.trained)
    restored = train(make_learner(family, seed=5, algorithm=algorithm), 7)
    load_checkpoint(Manifest.load(checkpoint), restored, TOKENIZER)
    assert same_bits(at_save, weights_of(restored.trained))
    assert restored.updates_done == learner.updates_done == 4
    one, other = (
        [r for seed in (2, 3) for r in x.train_batch(random_groups(seed, groups=4))] for x in (learner, restored)
    )
    assert one == other
    assert same_bits(weights_of(learner.trained), weights_of(restored.trained))
    assert not same_bits(at_save, weights_of(restored.trained))


def test_saving_changes_nothing(tmp_path: Path) -> None:
    learner, other = (train(make_learner(), 0) for _ in range(2))
    saved(tmp_path, learner)
    assert same_bits(weights_of(train(learner, 1).model), weights_of(train(other, 1).model))


def test_a_checkpoint_is_a_model_directory_and_nothing_else_is_left(tmp_path: Path) -> None:
    learner = train(make_learner(), 0)
    checkpoint = saved(tmp_path, learner)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    names = {p.name for p in checkpoint.iterdir()}
    assert names == {
        "model.safetensors",
        "config.json",
        "optimizer.safetensors",
        "checkpoint.json",
        MANIFEST,
        *(p.name for p in TOKENIZER.iterdir()),
    }
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert same_bits(weights_of(model), weights_of(learner.model))
    size = sum(p.stat().st_size for p in checkpoint.glob("*.safetensors"))
    assert 0.8 < checkpoint_bytes(learner) / size < 1.2


def test_saving_again_replaces(tmp_path: Path) -> None:
    """A run that was rolled back reaches the same update again."""
    learner = train(make_learner(), 0)
    saved(tmp_path, learner)
    (tmp_path / "step-1" / "leftover").touch()
    (tmp_path / ".step-1.tmp").mkdir()
    (tmp_path / ".step-1.tmp" / "half").touch()
    checkpoint = saved(tmp_path, train(learner, 1))
    restored = make_learner()
    load_checkpoint(Manifest.load(checkpoint), restored, TOKENIZER)
    assert restored.updates_done == 4
    assert not (checkpoint / "leftover").exists() and not (checkpoint / "half").exists()


# What does not fit


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3", {"hidden_size": 20}, "another model: hidden_size is 16 there, 20 in the configured model"),
        ("qwen3", {"num_hidden_layers": 3}, "another model: layer_types is .*there"),
        ("qwen3", {"rms_norm_eps": 1e-5}, "another model: rms_norm_eps is 1e-06 there, 1e-05 in the configured model"),
        ("qwen3-untied", {}, "another model: tie_word_embeddings is True there, False in the configured model"),
    ],
)
def test_another_model_is_named(tmp_path: Path, family: str, fields: dict[str, Any], message: str) -> None:
    checkpoint = saved(tmp_path)
    learner = make_learner(family, **fields)
    before = weights_of(learner.model)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(Manifest.load(checkpoint), learner, TOKENIZER)
    assert same_bits(before, weights_of(learner.model))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_another_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    checkpoint = saved(tmp_path)
    other = shutil.copytree(TOKENIZER, tmp_path / "other")
    (other / name).write_bytes((TOKENIZER / name).read_bytes() + b" ")
    with pytest.raises(CheckpointError, match=rf"another tokenizer than .*other/{name}"):
        load_checkpoint(Manifest.load(checkpoint), make_learner(), other)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "one bit"])
def test_a_damaged_file_is_found_before_anything_is_loaded(tmp_path: Path, damage: str) -> None:
    checkpoint = saved(tmp_path, make_learner(algorithm=WHOLE))
    learner = make_learner(seed=1, algorithm=WHOLE)
    before = weights_of(learner.trained)
    tensors = ("model", "optimizer", "reference", "value_head")
    for name in (*(f"{name}.safetensors" for name in tensors), "checkpoint.json", MANIFEST):
        path, content = checkpoint / name, (checkpoint / name).read_bytes()
        path.unlink()
        if damage != "missing":
            flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
            path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "one bit": flipped}[damage])
        said = "" if (name, damage) == (MANIFEST, "one bit") else name  # it may be in any file's name or digest
        with pytest.raises(DamageError, match=f"step-1 is damaged: {said}"):
            load_checkpoint(Manifest.load(checkpoint), learner, TOKENIZER)
        path.write_bytes(content)
    assert same_bits(before, weights_of(learner.trained)) and learner.updates_done == 0


def test_no_checkpoint_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RemovedError, match="nowhere is gone"):
        load_checkpoint(Manifest.load(tmp_path / "nowhere"), make_learner(), TOKENIZER)


def test_copying_weights_copies_and_names_their_source() -> None:
    model, other = tiny(), tiny(seed=1)
    weights = {name: tensor.clone() for name, tensor in unique_weights(other).items()}
    copy_weights(unique_weights(model), InMemory(weights), "cache")
    assert same_bits(weights_of(model), weights_of(other))
    del weights["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"cache holds another model: model.norm.weight is absent there"):
        copy_weights(unique_weights(model), InMemory(weights), "cache")


# Disks that refuse

FULL_DISK = """
import resource, sys
from pathlib import Path
from tests.training.test_checkpoint import TOKENIZER, make_learner, train
from treadle.core.errors import CheckpointError, DamageError, RemovedError
from treadle.training.checkpoint import export_model, save_checkpoint
learner = train(make_learner(), 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
target = Path(sys.argv[1])
for write in (
    lambda: save_checkpoint(target / "step-1", learner, TOKENIZER),
    lambda: export_model(target / "export", learner.model, TOKENIZER),
):
    try:
        write()
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    save, export = result.stdout.splitlines()
    assert "could not write" in save and "step-1" in save and "File too large" in save and "free disk space" in save
    assert "could not write" in export and "export" in export
    assert list(tmp_path.iterdir()) == []


def test_old_checkpoints_are_removed_and_half_written_ones_too(tmp_path: Path) -> None:
    for name in ("step-1", "step-2", ".step-3.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").touch()
    remove_others(tmp_path, ["step-2"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-2"]


# Export


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_exported_model_is_the_model_to_transformers(tmp_path: Path, family: str) -> None:
    learner = train(make_learner(family), 0)
    export_model(tmp_path / "out" / "model", learner.model, TOKENIZER)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    stock = copy.deepcopy(learner.model).eval()
    stock.set_attn_implementation("sdpa")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (2, 20)))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, stock(ids).logits)
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert config["architectures"] == [type(learner.model).__name__]  # other engines choose the class by it
    assert config["dtype"] == "float32"
    assert "treadle" not in json.dumps(config)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out" / "model")) > 0


def test_an_exported_model_is_a_model_path(tmp_path: Path) -> None:
    model = tiny()
    export_model(tmp_path / "model", model, TOKENIZER)
    again = make_model(ModelConfig(path=str(tmp_path / "model")), VOCABULARY, seed=9)
    assert weights_sha256(unique_weights(again)) == weights_sha256(unique_weights(model))


def test_an_export_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(CheckpointError, match="exists already; choose another directory"):
        export_model(tmp_path / "model", tiny(), TOKENIZER)
    assert list((tmp_path / "model").iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_file_of_tensors_that_come_one_at_a_time_is_the_one_that_safetensors_writes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    tensors = {"ä step": torch.zeros(()), "none": torch.zeros(0, 3), **dict(published(tiny()))}
    weights = {name: tensors[name].to(dtype) for name in sorted(tensors)}
    save_file(weights, tmp_path / "wanted", {"format": "pt"})
    write_tensors(tmp_path / "found", weights, iter(weights.items()), {"format": "pt"})
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_tensors_of_several_types_may_come_in_any_order(tmp_path: Path) -> None:
    weights = {
        "a": torch.arange(3, dtype=torch.bfloat16),
        "b": torch.arange(5, dtype=torch.float64),
        "c": torch.arange(2, dtype=torch.float32),
    }
    save_file(weights, tmp_path / "wanted", {"format": "pt"})
    write_tensors(tmp_path / "found", weights, reversed(weights.items()), {"format": "pt"})
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()
