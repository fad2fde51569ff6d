"""Adapters that peft wrote: each computes as peft has it, or is refused by name."""

import json
import re
import typing
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import tiny
from tests.training.test_lora import TOKENIZER, load, moved_learner
from treadle.core.errors import ConfigError, DamageError
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.loading import make_model
from treadle.models.weights import adapter_weights
from treadle.training.checkpoint import export_model, save_checkpoint

NAMES = ["q_proj", "v_proj"]
IDS = torch.arange(5, 30)[None]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bases")
    for family in ("qwen3", "qwen3-untied"):
        export_model(directory / family, tiny(family, vocab_size=512), TOKENIZER)
    return directory


@pytest.fixture(scope="module")
def base(bases: Path) -> Path:
    return bases / "qwen3"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS).logits
    return found


@contextmanager
def as_peft_likes() -> Iterator[None]:
    """Within, warnings are none of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write(base: Path, directory: Path, save: dict[str, Any] | None = None, **settings: Any) -> None:
    """An adapter as peft makes and saves it, with weights that are not those of the start."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": NAMES, "task_type": "CAUSAL_LM", **settings}
    with torch.random.fork_rng([]), as_peft_likes():
        torch.manual_seed(1)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**settings))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(str(directory), **(save or {}))


def set_config(directory: Path, **settings: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def theirs(base: Path, directory: Path) -> Tensor:
    with as_peft_likes():
        return logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory))


def fitting(directory: Path, targets: Any = tuple(NAMES)) -> LoraConfig:
    settings = json.loads((directory / "adapter_config.json").read_text())
    return LoraConfig(
        rank=settings["r"], alpha=settings["lora_alpha"], targets=targets, rank_stabilized=settings["use_rslora"]
    )


PLAIN: dict[str, dict[str, Any]] = {
    "true": {},
    "false": {"init_lora_weights": False},
    "gaussian": {"init_lora_weights": "gaussian"},
    "eva": {"init_lora_weights": "eva"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "rank-stabilized": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.3},
    "wrong way round, which peft corrects": {"fan_in_fan_out": True},
    "no task": {"task_type": None},
}


@pytest.mark.parametrize("name", PLAIN)
def test_it_computes_as_in_peft(base: Path, tmp_path: Path, name: str) -> None:
    write(base, tmp_path / "a", **PLAIN[name])
    wanted = theirs(base, tmp_path / "a")
    assert (wanted - logits(load(base, None))).abs().max() > 0.1
    trained = load(base, fitting(tmp_path / "a"), tmp_path / "a")
    assert torch.equal(logits(trained), wanted)
    assert {name for name, p in trained.named_parameters() if p.requires_grad} == {
        name for name, _ in trained.named_parameters() if ".lora_" in name
    }
    assert (logits(load(base, None, tmp_path / "a")) - wanted).abs().max() < 1e-4


PLAIN_STARTS = [settings["init_lora_weights"] for settings in PLAIN.values() if "init_lora_weights" in settings]


def other_starts() -> list[str]:
    """All that the installed peft declares, some that it knows all the same, and one of tomorrow."""
    hint = typing.get_type_hints(peft.LoraConfig)["init_lora_weights"]
    declared = [name for part in typing.get_args(hint) for name in typing.get_args(part)]
    assert {"pissa", "olora", "loftq", "corda"} <= {*declared}
    more = ["pissa_niter_4", "OLoRA", "lora_ga", "mica", "tomorrow"]
    return sorted({*declared, *more} - {str(start) for start in PLAIN_STARTS})


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8, targets=tuple(NAMES))])
@pytest.mark.parametrize("start", other_starts())
def test_a_start_that_changes_the_base_is_refused(
    base: Path, tmp_path: Path, start: str, lora: LoraConfig | None
) -> None:
    write(base, tmp_path / "a")
    set_config(tmp_path / "a", init_lora_weights=start)
    with pytest.raises(ConfigError, match=f"has init_lora_weights = {re.escape(repr(start))}, .*path_initial_model"):
        load(base, lora, tmp_path / "a")


@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_4"])
def test_one_that_was_converted_computes_as_in_peft(base: Path, tmp_path: Path, start: Any) -> None:
    with as_peft_likes():
        model: Any = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            peft.LoraConfig(init_lora_weights=start, target_modules=NAMES, task_type="CAUSAL_LM", r=4, lora_alpha=8),
        )
        config: Any = model.peft_config["default"]
        config.init_lora_weights = True
        model.save_pretrained(tmp_path / "start")
        config.init_lora_weights = start
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1
        model.save_pretrained(tmp_path / "a", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    wanted = theirs(base, tmp_path / "a")
    assert (wanted - logits(model)).abs().max() < 1e-4
    assert torch.equal(logits(load(base, fitting(tmp_path / "a"), tmp_path / "a")), wanted)


OTHERS: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "layers_to_transform": {"layers_to_transform": 0},
    "exclude_modules": {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "target_parameters": {"target_parameters": ["model.layers.0.self_attn.q_proj.weight"], "target_modules": []},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5, 6]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_more_than_lora_is_refused_by_name(base: Path, tmp_path: Path, name: str) -> None:
    write(base, tmp_path / "a", **OTHERS[name])
    with pytest.raises(ConfigError, match=rf"^model.adapter: '[^']*' has {name} = .*merge it into its base with peft"):
        load(base, None, tmp_path / "a")


@pytest.mark.parametrize(
    ("chosen", "targets"),
    [
        (r".*\.(q|v)_proj", tuple(NAMES)),
        ("all-linear", "all-linear"),
        (r".*self_attn\.\w_proj", "attention"),
        ([f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in NAMES], tuple(NAMES)),
    ],
)
def test_however_its_layers_are_chosen_it_can_be_trained(base: Path, tmp_path: Path, chosen: Any, targets: Any) -> None:
    write(base, tmp_path / "a", target_modules=chosen)
    trained = load(base, fitting(tmp_path / "a", targets), tmp_path / "a")
    assert torch.equal(logits(trained), theirs(base, tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"training.lora.targets is \['gate_proj'\], and the adapter in .* has \["):
        load(base, fitting(tmp_path / "a", ("gate_proj",)), tmp_path / "a")


@pytest.mark.parametrize("chosen", [r".*layers\.1\..*(q|v)_proj", ["q_proj", "layers.1.self_attn.v_proj"]])
def test_layers_that_no_name_chooses_are_merged_and_not_trained(base: Path, tmp_path: Path, chosen: Any) -> None:
    write(base, tmp_path / "a", target_modules=chosen)
    assert (logits(load(base, None, tmp_path / "a")) - theirs(base, tmp_path / "a")).abs().max() < 1e-4
    with pytest.raises(ConfigError, match=r"for example model\.layers\.0\.self_attn\..*; leave training.lora out"):
        load(base, fitting(tmp_path / "a"), tmp_path / "a")


def test_a_head_is_merged_and_no_longer_the_embedding(bases: Path, tmp_path: Path) -> None:
    """peft merges a tied one into both."""
    for family in ("qwen3-untied", "qwen3"):
        write(bases / family, tmp_path / family, {"save_embedding_layers": False}, target_modules=["q_proj", "lm_head"])
    untied, adapter = bases / "qwen3-untied", tmp_path / "qwen3-untied"
    assert (logits(load(untied, None, adapter)) - theirs(untied, adapter)).abs().max() < 1e-4
    with pytest.raises(ConfigError, match=r"never the head\), otherwise for example lm_head; leave training.lora out"):
        load(untied, fitting(adapter, ("q_proj",)), adapter)
    tied, adapter = bases / "qwen3", tmp_path / "qwen3"
    merged = load(tied, None, adapter)
    adapted = AutoModelForCausalLM.from_pretrained(tied)
    with as_peft_likes():
        expected = logits(peft.PeftModel.from_pretrained(adapted, adapter))
    assert (logits(merged) - expected).abs().max() < 1e-4
    assert (logits(merged) - logits(AutoModelForCausalLM.from_pretrained(tied))).abs().max() > 1e-2
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits(merged))


def test_weights_that_are_no_lora_of_linear_layers_are_refused(bases: Path, tmp_path: Path) -> None:
    base = bases / "qwen3-untied"
    write(base, tmp_path / "a", target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ConfigError, match=r"embed_tokens.* does not fit the model: .*merge it into its base with peft"):
        load(base, None, tmp_path / "a")


def shapes(base: Path, lora: LoraConfig | None, adapter: Path) -> PreTrainedModel:
    return make_model(ModelConfig(path=str(base), adapter=str(adapter)), 512, 0, weights=False, lora=lora)


def test_without_weights_the_same_is_refused_and_the_same_layers_are_adapted(base: Path, tmp_path: Path) -> None:
    """As a dry run does, and all ranks but the first."""
    write(base, tmp_path / "a")
    lora = fitting(tmp_path / "a")
    model, whole = shapes(base, lora, tmp_path / "a"), load(base, lora, tmp_path / "a")
    assert [(n, p.shape, p.requires_grad) for n, p in model.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in whole.named_parameters()
    ]
    assert all(p.is_meta for p in model.parameters())
    assert not adapter_weights(shapes(base, None, tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"training\.lora\.rank is 8"):
        shapes(base, LoraConfig(rank=8), tmp_path / "a")
    set_config(tmp_path / "a", init_lora_weights="pissa")
    with pytest.raises(ConfigError, match="init_lora_weights = 'pissa'"):
        shapes(base, None, tmp_path / "a")


@pytest.mark.parametrize("name", ["base.json", "adapter_config.json", "adapter_model.safetensors"])
def test_a_checkpoint_without_one_of_its_files_is_damaged(base: Path, tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path / "a", moved_learner(base), TOKENIZER)
    (tmp_path / "a" / name).unlink()
    error = ConfigError if name == "adapter_config.json" else DamageError  # without that one it is no adapter
    for make in (load, lambda base, lora, adapter: shapes(base, lora, adapter)):
        with pytest.raises(error, match=name):
            make(base, None, tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "content"),
    [("base.json", b"{"), ("base.json", b"[]"), ("base.json", b"{}"), ("adapter_config.json", b"{")],
)
def test_files_that_cannot_be_read_are_named(base: Path, tmp_path: Path, name: str, content: bytes) -> None:
    write(base, tmp_path / "a")
    (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"model.adapter: .* cannot be loaded"):
        load(base, None, tmp_path / "a")


def test_one_in_bfloat16_computes_as_in_peft(base: Path, tmp_path: Path) -> None:
    write(base, tmp_path / "a")
    file = tmp_path / "a/adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    assert torch.equal(logits(load(base, fitting(tmp_path / "a"), tmp_path / "a")), theirs(base, tmp_path / "a"))
