"""The weights of a Hugging Face model by name, tied ones once: three named sets, and their digest.

`trained`, `published` and `saved` (`treadle.core.trainer`) cover all weights, or only the adapters if a model has any
(plus other trained parts, such as a value head). For a checkpoint with towers (`models.multimodal`), they cover the
language part; files also contain the `rest`. If ranks share a model, trained and saved tensors are each rank's shards;
published ones are whole, gathered one at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG_NOT_COMPARED = {"architectures", "dtype", "transformers_version"}
"""Fields of a model's configuration written for other readers, or by another version of transformers."""


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """Contents of a model's files besides the loaded language part, and the names in the files.

    names: names of the language part, in the model -> in the files. tensors: the rest, by names in the files, on the
    CPU. Copies of a model share it.
    """

    names: Mapping[str, str]
    tensors: Mapping[str, Tensor]

    def __deepcopy__(self, memo: dict[int, Any]) -> Rest:
        return self


_REST = "_treadle_rest"


def set_rest(model: nn.Module, rest: Rest) -> None:
    """Register the other contents of a model's files."""
    setattr(model, _REST, rest)


def is_language_part(model: nn.Module) -> bool:
    """Return whether a model is the language part of a larger checkpoint."""
    rest = _rest(model)
    return rest is not None and bool(rest.tensors)


def rest_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Return name -> tensor of the contents of a model's files besides `saved`; {} for adapters, or without towers."""
    rest = _rest(model)
    return {} if rest is None or adapter_weights(model) else rest.tensors


def convert_rest(model: nn.Module, dtype: torch.dtype) -> None:
    """Have files of a model with a rest contain the rest in the given precision."""
    if (rest := _rest(model)) is not None:
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in rest.tensors.items()}
        set_rest(model, Rest(rest.names, tensors))


def _rest(model: nn.Module) -> Rest | None:
    return cast(Rest | None, vars(model).get(_REST))


def unique_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor (not copied) of every parameter and persistent buffer, a tied one under its first name.

    Names are those in the model's files if it has a `rest`.
    """
    rest = _rest(model)
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name if rest is None else rest.names[name]] = tensor.detach()
    return weights


def adapter_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor (not copied) of a model's LoRA adapters, named as in peft's files; empty without any."""
    weights = module.state_dict(keep_vars=True).items()
    parts = (".lora_A.default.", ".lora_B.default.")
    return {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.detach()
        for name, tensor in weights
        if any(part in name for part in parts)
    }


def trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of the optimizer's weights, in the module's own order; tied ones once."""
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def published(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of the weights that engines serve, in the order of names; tied ones under their first name.

    Tensors are not copied; sharded ones are gathered in turn, in which all ranks must take part.
    """
    return gathered(saved(module))


def described(module: nn.Module) -> dict[str, Tensor]:
    """Return tensors with dtype and shape of each of `published`, by the same names in the same order."""
    return dict(sorted(saved(module).items()))


def saved(module: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor, not copied, of a checkpoint's or export's weights; tied ones under their first name."""
    return adapter_weights(module) or unique_weights(module)


@contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Have the model compute with other adapters inside the block, by the names of `adapter_weights`."""
    mine = adapter_weights(model)
    kept = {name: tensor.clone() for name, tensor in mine.items()}
    copy_by_name(mine, weights)
    try:
        yield
    finally:
        copy_by_name(mine, kept)


@torch.no_grad()
def copy_by_name(mine: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy tensors in place, by name."""
    for name, tensor in mine.items():
        tensor.copy_(weights[name])


def gathered(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor in the order of names, not copied unless sharded, and then gathered."""
    return ((name, whole(weights[name])) for name in sorted(weights))


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor; a sharded one is gathered, which all ranks must do together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of names, dtypes, shapes and bytes, in the order of names."""
    return weights_digest(sorted(weights.items()))


def model_sha256(model: PreTrainedModel) -> str:
    """Return the SHA-256 (hex) of a model's weights and configuration, wherever its files are."""
    config = {k: v for k, v in json.loads(model.config.to_json_string()).items() if k not in CONFIG_NOT_COMPARED}
    return hashlib.sha256(f"{weights_sha256(saved(model))} {json.dumps(config, sort_keys=True)}".encode()).hexdigest()


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return `weights_sha256` of (name, tensor) pairs in the order of names, keeping one in memory at a time."""
    digest = hashlib.sha256()
    for name, tensor in weights:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
