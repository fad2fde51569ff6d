"""LoRA adapters (https://arxiv.org/abs/2106.09685) of a model's linear layers, by peft, and their files.

An adapter's directory is in peft's own format, beside it the base it belongs to:

    adapter_model.safetensors  adapter_config.json    `PeftModel.from_pretrained(base, directory)` loads them
    base.json                                         {"path": ..., "sha256": ...} of the base
    tokenizer.json ...                                the tokenizer it was trained with
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.core.errors import CheckpointError, ConfigError
from treadle.core.files import Manifest, prove_files
from treadle.models.config import LoraConfig
from treadle.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE
from treadle.models.weights import adapter_weights, copy_by_name


def adapt(
    model: PreTrainedModel, adapter: str | None, config: LoraConfig | None, seed: int, half: bool, weights: bool
) -> None:
    """Give a base the configured adapter: merged into it, or to be trained on if `config` is given; a new one without.

    half: hold the base in bfloat16, beside adapters in float32. weights: without them the model has shapes alone.
    Raises ConfigError for targets that the model lacks, and for an adapter that cannot be loaded or belongs elsewhere.
    """
    if adapter is not None and weights:
        load_adapter(model, Path(adapter), config)
    elif config is not None:
        add_adapters(model, config, seed)
    if half and config is not None:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Give the model's linear layers adapters, which alone are trained from now on; the model computes as before."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        _inject(model, _peft_config(model, config))


def _peft_config(model: PreTrainedModel, config: LoraConfig) -> peft.LoraConfig:
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.scale,
        use_rslora=config.rank_stabilized,
        target_modules=target_names(model, config.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _inject(model: PreTrainedModel, config: peft.LoraConfig) -> None:
    config.base_model_name_or_path = str(Path(str(model.name_or_path)).resolve())
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def target_names(model: PreTrainedModel, targets: str | tuple[str, ...]) -> list[str]:
    """Return the last parts of the names of the linear layers that get an adapter: `["k_proj", "q_proj"]`.

    Raises ConfigError for names that no linear layer has.
    """
    head = model.get_output_embeddings()
    linear = {
        name: module for name, module in model.named_modules() if type(module) is nn.Linear and module is not head
    }
    attention = {name for name, m in model.named_modules() if type(m).__name__.lower().endswith("attention")}
    inside = {name for name in linear if name.rpartition(".")[0] in attention}
    presets = {"all-linear": set(linear), "attention": inside, "mlp": set(linear) - inside}
    if isinstance(targets, str):
        if not presets[targets]:
            raise ConfigError(f"training.lora.targets: {type(model).__name__} has no linear layers for {targets!r}")
        return sorted({name.rpartition(".")[2] for name in presets[targets]})
    known = {name.rpartition(".")[2] for name in linear}
    if unknown := sorted(set(targets) - known):
        raise ConfigError(
            f"training.lora.targets: {type(model).__name__} has no linear layers named {unknown}; it has "
            f"{sorted(known)}, and experts, routers and the head cannot have adapters"
        )
    return sorted(set(targets))


def load_adapter(model: PreTrainedModel, directory: Path, config: LoraConfig | None) -> None:
    """Give the model the adapter in a directory: merged into its weights, or to be trained on if `config` is given.

    Raises ConfigError for files that cannot be loaded, or other settings than those of `config`; CheckpointError for
    another base.
    """
    prove_files(directory, (ADAPTER_WEIGHTS, ADAPTER_CONFIG), "export the adapter again")
    if (directory / BASE).is_file():  # peft's own directories have none
        _check_base(json.loads((directory / BASE).read_bytes()), directory, Path(str(model.name_or_path)))
    try:
        there = _read_config(directory, (directory / ADAPTER_CONFIG).read_bytes())
        weights = load_file(directory / ADAPTER_WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ConfigError(f"model.adapter: {str(directory)!r} cannot be loaded: {error}") from error
    if config is not None:
        _check_same(directory, there, _peft_config(model, config), ConfigError)
    _inject(model, there)
    copy_adapter(model, weights, str(directory))
    if config is None:
        merge(model)


_READ = ("r", "lora_alpha", "use_rslora", "target_modules", "task_type")
_UNUSED = ("base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_dropout", "peft_version", "revision")


def _read_config(directory: Path, content: bytes) -> peft.LoraConfig:
    """Return the settings of the adapter in a directory. Raises ConfigError for more than LoRA of linear layers."""
    settings = json.loads(content)
    config = peft.LoraConfig(**{name: settings[name] for name in _READ if name in settings})
    for name in sorted(settings.keys() - {*_READ, *_UNUSED}):
        if settings[name] and settings[name] != getattr(config, name, None):
            raise ConfigError(
                f"model.adapter: {str(directory)!r} has {name} = {settings[name]!r}, which is not supported; merge it "
                "into its base with peft, and give that as model.path"
            )
    return config


_SETTINGS = {"rank": "r", "alpha": "lora_alpha", "rank_stabilized": "use_rslora", "targets": "target_modules"}


def _check_same(
    directory: Path, theirs: peft.LoraConfig, ours: peft.LoraConfig, error: type[ConfigError | CheckpointError]
) -> None:
    """Raise the error if the adapter in a directory was made with other settings than `training.lora`."""
    for name, field in _SETTINGS.items():
        there, here = getattr(theirs, field), getattr(ours, field)
        if there != here:
            there, here = (sorted(value) if isinstance(value, set) else value for value in (there, here))
            raise error(
                f"training.lora.{name} is {here!r}, and the adapter in {str(directory)!r} has {there!r}; set it to "
                "that, or start without that adapter"
            )


def copy_adapter(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy an adapter's weights, by peft's names, into the model. Raises ConfigError if they do not fit."""
    mine = adapter_weights(model)
    for name in sorted(mine.keys() | weights.keys()):
        if name not in mine or name not in weights or mine[name].shape != weights[name].shape:
            raise ConfigError(f"model.adapter: {name} of {source!r} does not fit the model")
    copy_by_name(mine, weights)


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Add the adapters to the weights of the base, in float32, and remove them."""
    for name, module in list(model.named_modules()):
        if isinstance(module, peft.tuners.lora.Linear):
            base: Any = module.get_base_layer()
            base.weight.copy_(base.weight.float() + module.get_delta_weight("default"))
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, base)
    del model.peft_config
    model.requires_grad_(True)


def check_adapter(model: PreTrainedModel, checkpoint: Manifest) -> None:
    """Raise CheckpointError unless a checkpoint holds the adapter of a model like this one, on the same base."""
    where = checkpoint.directory
    if ADAPTER_CONFIG not in checkpoint.sha256:
        raise CheckpointError(f"checkpoint {where} holds a whole model, and training.lora is set")
    ours: Any = model.peft_config["default"]
    _check_same(where, _read_config(where, checkpoint.read(ADAPTER_CONFIG)), ours, CheckpointError)
    _check_base(json.loads(checkpoint.read(BASE)), where, Path(str(model.name_or_path)))


def adapter_files(model: PreTrainedModel) -> Iterable[tuple[str, bytes]]:
    """Yield name and content of what describes a model's adapter and its base."""
    config: Any = model.peft_config["default"]
    settings = config.to_dict() | {"inference_mode": True}
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    yield ADAPTER_CONFIG, json.dumps(plain, indent=2, sort_keys=True, default=lambda value: value.value).encode()
    base = Path(str(model.name_or_path)).resolve()
    yield BASE, json.dumps({"path": str(base), "sha256": base_sha256(base)}, indent=2).encode()


@cache
def base_sha256(directory: Path) -> str:
    """Return the SHA-256 (hex) of a base: names and contents of its configuration and files of weights."""
    digest = hashlib.sha256()
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _check_base(recorded: Mapping[str, str], adapter: Path, base: Path) -> None:
    """Raise CheckpointError if the adapter belongs to another base."""
    if recorded["sha256"] != (actual := base_sha256(base.resolve())):
        raise CheckpointError(
            f"the adapter in {adapter} belongs to the base {recorded['path']} (SHA-256 {recorded['sha256'][:12]}), and "
            f"{base} is another one ({actual[:12]}); set model.path to the base that it was trained on"
        )
