"""Checkpoints: a Hugging Face directory plus the optimizer. Complete or absent, safetensors only, no pickle.

step-000040/  model.safetensors config.json tokenizer.json ...   loadable by transformers
              optimizer.safetensors  checkpoint.json             what resuming needs besides
              value_head.safetensors  reference.safetensors      if there are any
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.core.errors import CheckpointError
from treadle.core.files import sync_directory, write_durably
from treadle.engines.weights import unique_weights, weights_sha256
from treadle.training.learner import Learner
from treadle.training.model import TOKENIZER_FILES, file_sha256

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def write_model(directory: Path, model: PreTrainedModel, tokenizer: Path) -> None:
    """Write weights, config and tokenizer into an existing directory, durably. Raises OSError."""
    weights = {name: tensor.contiguous() for name, tensor in unique_weights(model).items()}
    write_durably(directory / "model.safetensors", save_safetensors(weights, {"format": "pt"}))
    config = json.loads(model.config.to_json_string())
    # inference engines choose the class by `architectures`, which only models that were loaded have
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    write_durably(directory / "config.json", json.dumps(config, indent=2, sort_keys=True).encode())
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            write_durably(directory / name, (tokenizer / name).read_bytes())


def export_model(
    directory: Path, model: PreTrainedModel, tokenizer: Path, beside: Mapping[str, bytes] | None = None
) -> None:
    """Write a model directory that transformers and `model.path` load, and further files by name. Complete or absent.

    Raises CheckpointError if the directory exists or the disk refuses.
    """
    if directory.exists():
        raise CheckpointError(f"{str(directory)!r} exists already; choose another directory")
    with _complete_or_absent(directory) as temporary:
        write_model(temporary, model, tokenizer)
        for name, content in (beside or {}).items():
            write_durably(temporary / name, content)


def read_model_files(checkpoint: Path) -> dict[str, bytes] | None:
    """What makes a checkpoint a model directory: name -> content; None if the checkpoint is removed meanwhile.

    Raises CheckpointError if it is damaged.
    """
    try:
        tokenizer = [name for name in TOKENIZER_FILES if (checkpoint / name).is_file()]
        names = ("model.safetensors", "config.json", *tokenizer, "checkpoint.json")
        files = {name: (checkpoint / name).read_bytes() for name in names}
        if not checkpoint.is_dir():  # then some tokenizer file may have been missed
            return None
        facts = _Facts(**json.loads(files.pop("checkpoint.json")))
        weights = load_safetensors(files["model.safetensors"])
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        if not checkpoint.is_dir():
            return None
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {error}") from error
    if weights_sha256(weights) != facts.weights_sha256:
        raise CheckpointError(
            f"checkpoint {checkpoint} is damaged: model.safetensors does not have the recorded SHA-256"
        )
    return files


def export_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write a new directory of these files. Complete or absent. Raises CheckpointError as `export_model` does."""
    if directory.exists():
        raise CheckpointError(f"{str(directory)!r} exists already; choose another directory")
    with _complete_or_absent(directory) as temporary:
        for name, content in files.items():
            write_durably(temporary / name, content)


@dataclass(frozen=True, slots=True)
class _Facts:
    """checkpoint.json."""

    updates_done: int
    kl_coef: float | None
    tokenizer_sha256: str
    weights_sha256: str
    optimizer_sha256: str
    value_head_sha256: str | None = None
    reference_sha256: str | None = None


def save_checkpoint(directory: Path, learner: Learner, tokenizer: Path) -> None:
    """Write the learner's state durably. Raises CheckpointError; then nothing of it is left."""
    with _complete_or_absent(directory) as temporary:
        if directory.is_dir():  # of a run that was rolled back: the ledger no longer points to it
            shutil.rmtree(directory)
        write_model(temporary, learner.model, tokenizer)
        moments = _optimizer_tensors(learner)
        write_durably(temporary / "optimizer.safetensors", save_safetensors(moments))
        beside = {name: unique_weights(module) for name, module in _beside(learner).items()}
        for name, tensors in beside.items():
            write_durably(temporary / f"{name}.safetensors", save_safetensors(tensors))
        facts = _Facts(
            updates_done=learner.updates_done,
            kl_coef=None if learner.kl is None else learner.kl.coef,
            tokenizer_sha256=file_sha256(tokenizer / "tokenizer.json"),
            weights_sha256=weights_sha256(learner.weights()),
            optimizer_sha256=weights_sha256(moments),
            **{f"{name}_sha256": weights_sha256(tensors) for name, tensors in beside.items()},
        )
        write_durably(temporary / "checkpoint.json", json.dumps(asdict(facts), indent=2).encode())


def load_checkpoint(directory: Path, learner: Learner, tokenizer: Path) -> None:
    """Restore a learner. Raises CheckpointError for a checkpoint that is damaged or of another model or tokenizer."""
    try:
        facts = _Facts(**json.loads((directory / "checkpoint.json").read_bytes()))
        weights = load_safetensors((directory / "model.safetensors").read_bytes())
        moments = load_safetensors((directory / "optimizer.safetensors").read_bytes())
        beside = {name: load_safetensors((directory / f"{name}.safetensors").read_bytes()) for name in _beside(learner)}
    except (OSError, SafetensorError, ValueError, TypeError) as error:  # ValueError: not UTF-8 or not JSON
        raise CheckpointError(f"checkpoint {directory} cannot be read: {error}") from error
    if facts.tokenizer_sha256 != file_sha256(tokenizer / "tokenizer.json"):
        raise CheckpointError(
            f"checkpoint {directory} was made with another tokenizer than {tokenizer / 'tokenizer.json'}"
        )
    for name, tensors, recorded in (
        ("model.safetensors", weights, facts.weights_sha256),
        ("optimizer.safetensors", moments, facts.optimizer_sha256),
        *((f"{name}.safetensors", tensors, getattr(facts, f"{name}_sha256")) for name, tensors in beside.items()),
    ):
        if weights_sha256(tensors) != recorded:
            raise CheckpointError(f"checkpoint {directory} is damaged: {name} does not have the recorded SHA-256")
    copy_weights(learner.model, weights, str(directory))
    for name, module in _beside(learner).items():
        copy_weights(module, beside[name], str(directory))
    _restore_moments(learner, moments)
    learner.updates_done = facts.updates_done
    if learner.kl is not None and facts.kl_coef is not None:
        learner.kl = replace(learner.kl, coef=facts.kl_coef)


def copy_weights(model: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Copy `weights` into the model. Raises CheckpointError, naming the first difference, if they do not fit it."""
    mine = unique_weights(model)
    for name in sorted(mine.keys() | weights.keys()):
        have, given = mine.get(name), weights.get(name)
        if have is None or given is None or have.shape != given.shape:
            raise CheckpointError(
                f"{source} holds another model: {name} is {_shape(given)} there, {_shape(have)} in the configured model"
            )
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(weights[name])


def checkpoint_bytes(learner: Learner) -> int:
    """About how large a checkpoint is: weights and two moments, and what lies beside them."""
    modules = [learner.trained] * 3 + list(_beside(learner).values())
    return sum(t.numel() * t.element_size() for module in modules for t in unique_weights(module).values())


def _beside(learner: Learner) -> dict[str, nn.Module]:
    """What else a learner computes with, by the name of its file."""
    reference = None if learner.reference is None else learner.reference.model
    modules = {"value_head": learner.value_head, "reference": reference}
    return {name: module for name, module in modules.items() if module is not None}


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{moment}.{name}": learner.optimizer.state[parameter][moment].contiguous()
        for name, parameter in learner.trained.named_parameters()
        if parameter in learner.optimizer.state
        for moment in _MOMENTS
    }


def _restore_moments(learner: Learner, moments: dict[str, Tensor]) -> None:
    """Parameters that never had a gradient have no moments; that none is lost, the recorded SHA-256 has shown."""
    learner.optimizer.state.clear()
    for name, parameter in learner.trained.named_parameters():
        if f"{_MOMENTS[0]}.{name}" in moments:
            learner.optimizer.state[parameter] = {
                moment: moments[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS
            }


@contextmanager
def _complete_or_absent(final: Path) -> Iterator[Path]:
    """A temporary directory beside `final` that becomes it on success and vanishes on failure."""
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_directory(temporary)
        temporary.replace(final)
        sync_directory(final.parent)
    except OSError as error:
        raise CheckpointError(
            f"could not write {final}: {error}; if the disk is full, free some space (a run then goes on with --resume)"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_others(checkpoints: Path, keep: Iterable[str]) -> None:
    """Delete every directory under `checkpoints` that is not to be kept, half-written ones included.

    To a reader each of them vanishes at once.
    """
    kept = set(keep)
    for directory in sorted(checkpoints.iterdir()):  # hidden ones first: an earlier process may have left a `.removed`
        if directory.is_dir() and directory.name not in kept:
            hidden = directory.name.startswith(".")
            shutil.rmtree(directory if hidden else directory.rename(directory.with_name(f".{directory.name}.removed")))
