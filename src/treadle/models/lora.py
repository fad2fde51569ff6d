"""LoRA adapters (https://arxiv.org/abs/2106.09685) of a model's linear layers, by peft, and their files.

An adapter's directory is in peft's own format, plus a file naming its base:

    adapter_model.safetensors  adapter_config.json    `PeftModel.from_pretrained(base, directory)` loads them
    base.json                                         {"path": ..., "sha256": ...} of the base
    tokenizer.json ...                                the tokenizer it was trained with
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.core.errors import CheckpointError, ConfigError
from treadle.core.files import Manifest, prove_files
from treadle.models.config import LoraConfig
from treadle.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, require_model
from treadle.models.pretrained import load_pretrained
from treadle.models.states import stateful_layers
from treadle.models.weights import adapter_weights, copy_by_name, is_language_part


def adapt(
    model: PreTrainedModel, adapter: str | None, config: LoraConfig | None, seed: int, half: bool, weights: bool
) -> None:
    """Give a base the configured adapter: merged, or trainable if `config` is given; a new one without `adapter`.

    half: keep the base in bfloat16, beside adapters in float32. weights: if false, the model has only shapes.
    Raises ConfigError for missing target layers, and for an adapter that cannot be loaded or belongs to another base.
    """
    if adapter is not None:
        load_adapter(model, Path(adapter), config, weights)
    elif config is not None:
        add_adapters(model, config, seed)
    if half and config is not None:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()


def add_adapters(model: PreTrainedModel, config: LoraConfig, seed: int, head: bool = False) -> None:
    """Give the model's linear layers adapters, the only trained weights from then on; its outputs do not change.

    head: whether the head has one, too, also if it shares its weights with the embedding, which does not change.
    """
    with torch.random.fork_rng([]), _tied():
        torch.manual_seed(seed)
        _inject(model, _peft_config(model, config, head))


@contextmanager
def _tied() -> Iterator[None]:
    """Silence peft's warning about an adapter of a head that shares its weights, which concerns merging."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        yield


def _peft_config(model: PreTrainedModel, config: LoraConfig, head: bool = False) -> peft.LoraConfig:
    embedding = model.get_output_embeddings()
    heads = [name.rpartition(".")[2] for name, module in model.named_modules() if head and module is embedding]
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.scale,
        use_rslora=config.rank_stabilized,
        target_modules=target_names(model, config.targets) + heads,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _inject(model: PreTrainedModel, config: peft.LoraConfig) -> None:
    config.base_model_name_or_path = str(Path(str(model.name_or_path)).resolve())
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _linear_layers(model: PreTrainedModel) -> set[str]:
    """Return the names of the linear layers that `training.lora` can adapt.

    All except the head, layers with weights that another layer reads directly, bypassing an adapter, and layers with
    names that peft takes for the model's experts.
    """
    head, named = model.get_output_embeddings(), dict(model.named_modules())
    linear = {name for name, module in named.items() if type(module) is nn.Linear and module is not head}
    read = {kind: _weights_read_by(kind) for kind in {type(module) for module in named.values()}}
    linear -= {f"{name}.{part}" for name, module in named.items() for part in read[type(module)]}
    experts = _taken_for_experts(model, {name.rpartition(".")[2] for name in linear})
    return {name for name in linear if name.rpartition(".")[2] not in experts}


def _weights_read_by(layer: type) -> set[str]:
    """Return the parts of a layer with weights that its code reads directly, as Mamba 2 does `out_proj`'s."""
    if not layer.__module__.startswith("transformers."):
        return set()
    return set(re.findall(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape))", inspect.getsource(layer)))


def _taken_for_experts(model: PreTrainedModel, names: Set[str]) -> Set[str]:
    """Return the names that peft replaces by names of the experts' fused weights, in any layer."""
    config = peft.LoraConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(config, model, None)
    return names - set(config.target_modules or ())


def target_names(model: PreTrainedModel, targets: str | tuple[str, ...]) -> list[str]:
    """Return the last parts of the names of the linear layers to adapt: `["k_proj", "q_proj"]`.

    Raises ConfigError for names that match no linear layer.
    """
    linear = _linear_layers(model)
    stateful = stateful_layers(model)  # they take the place of attention
    named = model.named_modules()
    attention = [n for n, m in named if m in stateful or type(m).__name__.lower().endswith("attention")]
    inside = {name for name in linear if any(name.startswith(f"{layer}.") for layer in attention)}
    presets = {"all-linear": linear, "attention": inside, "mlp": linear - inside}
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


def load_adapter(model: PreTrainedModel, directory: Path, config: LoraConfig | None, weights: bool = True) -> None:
    """Give the model the adapter in a directory: merged into its weights, or trainable if `config` is given.

    weights: if false, the model has only shapes, and its base is not hashed.
    Raises ConfigError for files that cannot be loaded, features beyond LoRA of linear layers, or settings that differ
    from `config`; DamageError as `prove_files`; CheckpointError for another base.
    """
    prove_files(directory, (ADAPTER_WEIGHTS, ADAPTER_CONFIG, BASE), "export the adapter again")
    try:
        settings = json.loads((directory / ADAPTER_CONFIG).read_bytes())
        there = _read_config(settings)
        tensors = load_file(directory / ADAPTER_WEIGHTS)
        base = _read_base((directory / BASE).read_bytes()) if (directory / BASE).is_file() else None
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"model.adapter: {str(directory)!r} cannot be loaded: {error}") from error
    # Directories made by peft have none.
    if base is not None and weights:
        _check_base(base, directory, Path(str(model.name_or_path)))
    _require_plain(model, directory, settings)
    layers = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    if config is None:
        _untie_head(model, layers)
    _require_untied(model, layers, directory)
    if config is not None:
        there = _read_config({**settings, "target_modules": _last_parts(layers, model, directory)})
        _check_same(directory, there, _peft_config(model, config), ConfigError)
    _inject(model, there)
    copy_adapter(model, tensors, str(directory))
    if config is None:
        merge(model)


def load_adapted(directory: Path) -> PreTrainedModel:
    """Return a base with the adapter in one of Treadle's own directories, for sampling. Raises ConfigError."""
    settings = json.loads((directory / ADAPTER_CONFIG).read_bytes())
    base = require_model(settings["base_model_name_or_path"], "model.adapter: its base")
    model = load_pretrained(base, "model.adapter: its base")
    _inject(model, _read_config(settings))
    copy_adapter(model, load_file(directory / ADAPTER_WEIGHTS), str(directory))
    return model


def add_recorded(model: PreTrainedModel, checkpoint: Manifest) -> None:
    """Give a model adapters of the shape of those in a checkpoint. Raises CheckpointError for one of another base."""
    if ADAPTER_CONFIG not in checkpoint.sha256:
        raise CheckpointError(f"checkpoint {checkpoint.directory} holds no adapter")
    settings = json.loads(checkpoint.read(ADAPTER_CONFIG))
    _require_plain(model, checkpoint.directory, settings)
    _check_base(_read_base(checkpoint.read(BASE)), checkpoint.directory, Path(str(model.name_or_path)))
    with _tied():
        _inject(model, _read_config(settings))


def _untie_head(model: PreTrainedModel, layers: Set[str]) -> None:
    """Give an adapted head weights of its own, if it shares the embedding's: merging would change both."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    named = {name for name, module in model.named_modules() if module is head}
    if not isinstance(head, torch.nn.Linear) or not named & layers or head.weight is not embedding.weight:
        return
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False


def _require_untied(model: PreTrainedModel, layers: Set[str], directory: Path) -> None:
    """Raise ConfigError for an adapted layer that shares its weights with another: merging would change both."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if name in layers and any(uses[id(parameter)] > 1 for parameter in module.parameters()):
            raise ConfigError(
                f"model.adapter: {str(directory)!r} adapts {name}, which shares its weights with another layer "
                "(tie_word_embeddings), so merging would change both; give an adapter without it"
            )


def _last_parts(layers: Set[str], model: PreTrainedModel, directory: Path) -> list[str]:
    """Return the last parts of the names of an adapter's layers, however its `target_modules` chooses them.

    Raises ConfigError unless these names choose the same layers.
    """
    names = {layer.rpartition(".")[2] for layer in layers}
    named = {layer for layer in _linear_layers(model) if layer.rpartition(".")[2] in names}
    if named != layers:
        raise ConfigError(
            f"model.adapter: {str(directory)!r} has an adapter for {len(layers)} layers, and training.lora.targets = "
            f"{sorted(names)} for {len(named)} (all linear layers of a name, never the head), otherwise for example "
            f"{min(named ^ layers)}; leave training.lora out, to merge it and train all weights, or {_MERGE}"
        )
    return sorted(names)


_READ = ("r", "lora_alpha", "use_rslora", "target_modules", "task_type")
_UNUSED = (
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
    "peft_version",
    "revision",
)
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # others change the base, or which parts are trained
_MERGE = "merge it into its base with peft, and give that as model.path"


def _read_config(settings: Mapping[str, Any]) -> peft.LoraConfig:
    return peft.LoraConfig(**{name: settings[name] for name in _READ if name in settings})


def _require_plain(model: PreTrainedModel, directory: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the first such setting, for an adapter with more than LoRA of linear layers."""
    if (start := settings.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        raise ConfigError(
            f"model.adapter: {str(directory)!r} has init_lora_weights = {start!r}, for which peft changes the base "
            "itself; where it was trained, save it with path_initial_model_for_weight_conversion, or merge it "
            "(merge_and_unload) and give that as model.path"
        )
    plain = peft.LoraConfig(exclude_modules=_excluded(model))
    for name in sorted(settings.keys() - {*_READ, *_UNUSED}):
        value = settings[name]
        unset = value is None or value is False or value in ("", [], {})
        if not unset and value != getattr(plain, name, None):
            raise ConfigError(
                f"model.adapter: {str(directory)!r} has {name} = {value!r}, which is not supported; {_MERGE}"
            )


_SETTINGS = {"rank": "r", "alpha": "lora_alpha", "rank_stabilized": "use_rslora", "targets": "target_modules"}


def _check_same(
    directory: Path, theirs: peft.LoraConfig, ours: peft.LoraConfig, error: type[ConfigError | CheckpointError]
) -> None:
    """Raise the error if the adapter in a directory was made with settings that differ from `training.lora`."""
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
            raise ConfigError(
                f"model.adapter: {name} of {source!r} does not fit the model: another base, or more than LoRA of "
                f"linear layers; {_MERGE}"
            )
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
    """Raise CheckpointError unless a checkpoint has the adapter of an equal model on the same base."""
    where = checkpoint.directory
    if ADAPTER_CONFIG not in checkpoint.sha256:
        raise CheckpointError(f"checkpoint {where} holds a whole model, and training.lora is set")
    ours: Any = model.peft_config["default"]
    settings = json.loads(checkpoint.read(ADAPTER_CONFIG))
    _require_plain(model, where, settings)
    _check_same(where, _read_config(settings), ours, CheckpointError)
    _check_base(_read_base(checkpoint.read(BASE)), where, Path(str(model.name_or_path)))


def adapter_files(model: PreTrainedModel) -> Iterable[tuple[str, bytes]]:
    """Yield name and content of the files that describe a model's adapter and its base."""
    config: Any = model.peft_config["default"]
    settings = config.to_dict() | {"inference_mode": True}
    settings["exclude_modules"] = _excluded(model)
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    yield ADAPTER_CONFIG, json.dumps(plain, indent=2, sort_keys=True, default=lambda value: value.value).encode()
    base = Path(str(model.name_or_path)).resolve()
    yield BASE, json.dumps({"path": str(base), "sha256": base_sha256(base)}, indent=2).encode()


def _excluded(model: PreTrainedModel) -> str | None:
    """Return, for peft, the layers without an adapter although towers have some of the same names."""
    if not is_language_part(model):
        return None
    decoder = model.get_decoder()
    [name] = [name for name, module in model.named_modules() if module is decoder]
    return rf"(?!{re.escape(name)}\.).*"


@cache
def base_sha256(directory: Path) -> str:
    """Return the SHA-256 (hex) of a base: names and contents of its configuration and weight files."""
    digest = hashlib.sha256()
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _read_base(content: bytes) -> tuple[str, str]:
    """Return path and SHA-256 of an adapter's base."""
    recorded = json.loads(content)
    return recorded["path"], recorded["sha256"]


def _check_base(recorded: tuple[str, str], adapter: Path, base: Path) -> None:
    """Raise CheckpointError if the adapter belongs to another base."""
    path, sha256 = recorded
    if sha256 != (actual := base_sha256(base.resolve())):
        raise CheckpointError(
            f"the adapter in {adapter} belongs to the base {path} (SHA-256 {sha256[:12]}), and {base} is another one "
            f"({actual[:12]}); set model.path to the base that it was trained on"
        )
