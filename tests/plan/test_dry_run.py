"""A dry run tries every part of a recipe by itself, with the steps that a run starts with, and changes nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from tests.models import FAMILIES, HYBRIDS, MORE_FAMILIES, make_group, make_step
from tests.models import tiny as tiny_model
from tests.seeing import whole, write
from tests.worlds import tiny
from treadle.api.train import dry_run
from treadle.core.errors import ConfigError
from treadle.engines.torch.model import CachedModel
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.models.states import state_memory
from treadle.models.towers import tower_size
from treadle.models.weights import published
from treadle.plan.config import RunConfig, load_recipe, recipe_names
from treadle.plan.dry_run import DryRun
from treadle.plan.memory import checkpoint_size, estimate_memory
from treadle.training.checkpoint import checkpoint_bytes
from treadle.training.frozen import make_reference
from treadle.training.learner import Learner
from treadle.training.make import load_model


def tried(config: RunConfig, runs: Path = Path("runs")) -> DryRun:
    return dry_run(config, runs, print)


def missing(found: DryRun) -> dict[str, str]:
    return {check.name: check.text for check in found.checks if check.is_missing}


def shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in published(model)}


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_passes_but_for_models_data_and_servers_that_are_not_here(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # some data sets ask for it
    # each set and its options are tried in a few tasks: those of all twenty thousand take half a minute
    few = [f"data.{split}.options.count=64" for split in ("train", "held_out")] if recipe == "reasoning-gym" else []
    config = load_recipe(recipe, few)
    found = tried(config)
    absent = missing(found)
    if config.model.path is None:
        assert not absent.keys() - {"driver", "teacher"}
    for name, text in absent.items():
        if name == "data":  # a file of the user's, or a directory
            assert ("cannot read data/" in text and "No such file or directory" in text) or "is not a directory" in text
        elif name == "driver":  # of a library in a Python of its own
            assert "is not an interpreter" in text or "driver_options.environment 'local' needs" in text
        elif name == "engine":
            assert config.engine.kind == "vllm" and "no vLLM" in text
        elif name == "teacher":  # a run of the user's
            assert "no directory" in text
        else:
            assert name in ("tokenizer", "model")
    assert list(tmp_path.iterdir()) == []


def test_the_first_prompt_is_what_the_model_will_see() -> None:
    found = tried(load_recipe("demo"))
    assert found.prompt is not None and found.renderer is not None
    text = found.renderer.decode(found.prompt.ids.tolist())
    assert text.startswith("<|im_start|>system\nSearch, then answer.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n")
    structure = found.renderer.structure
    marks = [structure.decode([ident]) for ident in found.prompt.ids.tolist() if structure.is_structural(ident)]
    assert marks == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]


BROKEN: dict[str, tuple[Sequence[str], dict[str, str]]] = {
    "data": (["data.train.source=nowhere.jsonl", "data.train.options={}"], {"data": "nowhere.jsonl"}),
    "reply parser": (["rollout.reply_parser=herms"], {"settings": "'herms' is not registered"}),
    "callbacks": (["callbacks=[typo]"], {"callbacks": "'typo' is not registered"}),
    "tokenizer": (
        ["model.tokenizer=nowhere"],
        {"tokenizer": "no tokenizer.json in 'nowhere'", "model": "model.build has no vocab_size"},
    ),
    "template": (["model.chat_template=/nowhere.jinja"], {"tokenizer": "no file '/nowhere.jinja'", "model": ""}),
    "model": (["model.build.hidden_sise=3"], {"model": "qwen3 knows no ['hidden_sise']"}),
    "model directory": (["model.build=null", "model.path=/nowhere"], {"model": "no directory '/nowhere'"}),
    "experts": (["training.routing_replay=true"], {"model": "has no experts to replay"}),
    "context": (["model.build.max_position_embeddings=8"], {"model": "exceeds the model's context of 8"}),
    "reference": (
        ["algorithm.kl={coef: 0.1, model: first}", "models.first.path=/nowhere"],
        {"reference": "models.first.path: no directory '/nowhere'"},
    ),
    "teacher": (
        ["algorithm.distillation.teacher=big", "models.big.path=/nowhere"],
        {"teacher": "models.big.path: no directory '/nowhere'"},
    ),
    "interpreter": (
        ["engine.kind=vllm", "engine.options.python=/nowhere"],
        {"engine": "'/nowhere' is not an interpreter"},
    ),
    "servers": (
        ["engine.kind=vllm", "engine.options.servers=['http://127.0.0.1:9']"],
        {"engine": "http://127.0.0.1:9 does not answer /health"},
    ),
    "driver": (
        ['environment=""', "driver=openenv", "driver_options={server: 'http://127.0.0.1:9', python: /nowhere}"],
        {"driver": "'/nowhere' is not an interpreter; name an interpreter with openenv-core"},
    ),
    "prompt": (["rollout.max_input_tokens=3"], {"first prompt": "rollout.max_input_tokens is 3"}),
    "demonstrations": (["warm_start={demonstrations: nowhere.jsonl}"], {"warm start": "no file 'nowhere.jsonl'"}),
    "memory": (
        ["model.build.hidden_size=65536", "model.build.intermediate_size=262144", "model.build.num_hidden_layers=80"],
        {"memory": "take a smaller model", "disk": "free some space"},
    ),
    "two parts": (
        ["callbacks=[typo]", "engine.kind=vllm", "engine.options.python=/nowhere"],
        {"callbacks": "typo", "engine": "/nowhere"},
    ),
}


@pytest.mark.parametrize(("overrides", "expected"), BROKEN.values(), ids=BROKEN)
def test_what_is_missing_is_named_and_the_rest_is_tried(overrides: Sequence[str], expected: dict[str, str]) -> None:
    found = tried(tiny(*overrides))
    assert missing(found).keys() == expected.keys(), missing(found)
    for name, text in expected.items():
        assert text in missing(found)[name]
    if not expected.keys() & {"tokenizer", "data", "driver", "first prompt"}:
        assert found.prompt is not None


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        raise ModuleNotFoundError("no", name="openai")

    monkeypatch.setattr("treadle.plan.player.load_agent", without)
    found = tried(load_recipe("lookup_agent"))
    assert missing(found) == {"data": "openai is not installed; pip install 'treadle[train]'"}


# Models without weights


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_model("qwen3-untied").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_a_model_without_weights_has_the_shapes_of_the_loaded_one(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), tokenizer="demo")
    found = make_model(config, 0, 0, weights=False)
    assert {tensor.device.type for _, tensor in published(found)} == {"meta"}
    assert shapes(found) == shapes(make_model(config, 0, 0)) == shapes(model)
    assert all(tensor.dtype == torch.float32 for tensor in found.parameters())


def test_weights_that_lack_in_a_file_are_named_without_reading_them(directory: Path) -> None:
    file = directory / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, {"format": "pt"})
    for with_weights in (True, False):
        with pytest.raises(ConfigError, match=r"lack 1 of the model's, for example lm_head\.weight"):
            make_model(ModelConfig(path=str(directory), tokenizer="demo"), 0, 0, weights=with_weights)


# Memory


def learner_of(config: RunConfig) -> Learner:
    model = load_model(config.model, 0)
    return Learner(model, config.training, config.algorithm, 4, reference=make_reference(config.algorithm.kl, model))


def tensor_bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())


@pytest.mark.parametrize("kl", [False, True])
def test_the_estimate_of_weights_gradients_and_optimizer_is_what_a_learner_has(kl: bool) -> None:
    config = tiny(*(["algorithm.kl={coef: 0.1}"] if kl else []))
    learner = learner_of(config)
    group = make_group([([make_step([5, 6], [7, 8])], 1.0), ([make_step([5, 6], [8, 7])], 0.0)])
    learner.train_batch([group])
    state = learner.optimizer.state.values()
    moments = sum(t.numel() * t.element_size() for s in state for name, t in s.items() if name != "step")
    model = make_model(config.model, 726, 0, weights=False)
    parts = {part.name: part.bytes for part in estimate_memory(config, model, None)}
    assert parts["weights"] == parts["gradients"] == tensor_bytes(learner.model)
    assert parts["AdamW's moments"] == moments
    assert parts.get("reference", 0) == (tensor_bytes(learner.reference.forward.model) if learner.reference else 0)
    assert checkpoint_size(config, model, None) == checkpoint_bytes(learner)


def test_a_teacher_is_counted_by_its_weights() -> None:
    config, teacher = tiny("algorithm.distillation.teacher=T", "models.T.path=T"), tiny_model("qwen3")
    model = make_model(config.model, 726, 0, weights=False)
    with_teacher, without = (
        {part.name: part.bytes for part in estimate_memory(config, model, None, each)} for each in (teacher, None)
    )
    assert with_teacher.keys() - without.keys() == {"teacher"} and with_teacher["teacher"] == tensor_bytes(teacher)


@pytest.mark.parametrize("vision", ["frozen", "train"])
def test_a_tower_is_counted_once(vision: str, tmp_path: Path) -> None:
    write(tmp_path, "qwen3_vl")
    seen = (f"model.path={tmp_path}", "model.build=null", "model.tokenizer=null", f"training.vision={vision}")
    config = tiny(*seen)
    model = make_model(config.model, 0, 0, weights=False, whole=config.training.trains_tower)
    parts = {part.name: part.bytes for part in estimate_memory(config, model, None, tower=tower_size(config.model))}
    everything = tensor_bytes(whole(tmp_path))
    assert ("tower" in parts) == (vision == "frozen")
    assert parts["weights"] + parts.get("tower", 0) == everything


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_are_counted_as_the_engine_counts_them(family: str) -> None:
    """It keeps two of each sequence, behind its prompt and its last token."""
    model = tiny_model(family)
    positions, states = CachedModel(model, torch.float32, 64).cache_bytes()
    assert 2 * state_memory(model).state == states
    config = tiny("rollout.max_input_tokens=90", "rollout.max_completion_tokens=6")
    parts = {part.name: part for part in estimate_memory(config, model, None)}
    cache = parts["the engine's KV cache"]
    sessions = int(cache.formula.split()[2])
    latent = family in ("kimi-linear", "bailing-hybrid")  # whose values are smaller than their keys
    assert latent or cache.bytes == sessions * (96 * positions + states)


def test_states_at_the_ends_of_calls_are_counted() -> None:
    wide = "training.max_tokens_per_microbatch=600", "rollout.max_completion_tokens=6"
    kinds = ["linear_attention"] * 2 + ["full_attention"]
    model = tiny_model("qwen3-5", num_hidden_layers=3, layer_types=kinds, linear_value_head_dim=8)
    config = tiny(*wide)
    most = config.training.tasks_per_update * config.training.group_size * config.rollout.max_steps
    state = 4 * (4 * 4 * 8 + 4 * (2 * 2 * 4 + 4 * 8))  # heads x keys x values, and 4 inputs of the convolution
    for overrides, ends, layers in (
        ((), most, 2),
        (("training.gradient_checkpointing=true",), most, 1),
        (("training.max_tokens_per_microbatch=31",), 5, 2),
    ):
        parts = {part.name: part.bytes for part in estimate_memory(tiny(*wide, *overrides), model, None)}
        assert parts["states"] == ends * 2 * layers * state, overrides
    assert "states" not in {part.name for part in estimate_memory(config, tiny_model(), None)}


DELTA = dict(linear_key_head_dim=16, linear_value_head_dim=16)
MAMBA = dict(mamba_d_head=32)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3-5", DELTA),
        ("olmo-hybrid", DELTA),
        ("bamba", MAMBA),
        ("granite-hybrid", MAMBA),
        ("falcon-h1", {**MAMBA, "mamba_d_ssm": 128}),
        ("lfm2", {"block_auto_adjust_ff_dim": False}),
    ],
)
def test_the_estimate_of_activations_is_near_what_autograd_keeps(family: str, fields: dict[str, Any]) -> None:
    model = tiny_model(family, hidden_size=64, intermediate_size=256, head_dim=16, **fields)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, Any]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    tokens = 128
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train().model(torch.from_numpy(np.arange(tokens)[None] % 32), use_cache=False)
    config = tiny(f"training.max_tokens_per_microbatch={tokens}")
    parts = {part.name: part.bytes for part in estimate_memory(config, model, None)}
    found = sum(size for size, _ in kept.values())
    assert 0.9 * found < parts["activations"] < 1.4 * found
