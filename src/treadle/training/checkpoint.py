"""Checkpoints: a Hugging Face directory plus the optimizer. Complete or absent, safetensors only, no pickle.

step-000040/  model.safetensors config.json tokenizer.json ...   loadable by transformers
              optimizer.safetensors  checkpoint.json             what resuming needs besides
              value_head.safetensors  reference.safetensors      if there are any
              SHA256SUMS                                         the manifest (core.manifest)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from treadle.core.errors import CheckpointError
from treadle.core.files import sha256_of
from treadle.core.manifest import Content, Manifest, NewDirectory, new_directory, remove_at_once
from treadle.models.loading import TOKENIZER_FILES
from treadle.models.weights import saved, trained
from treadle.training.learner import Learner

_FACTS = "checkpoint.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def model_files(model: PreTrainedModel, tokenizer: Path) -> Iterator[tuple[str, Content]]:
    """Yield name and content of what makes a model directory: weights, config, tokenizer. Raises OSError."""
    weights = {name: tensor.contiguous() for name, tensor in saved(model).items()}
    yield "model.safetensors", _tensors(weights, {"format": "pt"})
    config = json.loads(model.config.to_json_string())
    # inference engines choose the class by `architectures`, which only models that were loaded have
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    yield "config.json", json.dumps(config, indent=2, sort_keys=True).encode()
    for name in TOKENIZER_FILES:
        if name == "tokenizer.json" or (tokenizer / name).is_file():
            yield name, (tokenizer / name).read_bytes()


def _tensors(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Content:
    """Return what writes a safetensors file straight from the tensors: no second copy of them is made."""

    def write(path: Path) -> None:
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:  # safetensors has its own for a full disk
            raise OSError(str(error)) from error

    return write


def export_model(
    directory: Path, model: PreTrainedModel, tokenizer: Path, beside: Mapping[str, Content] | None = None
) -> None:
    """Write a model directory that transformers and `model.path` load, and further files by name. Complete or absent.

    Raises CheckpointError if the directory exists or the disk refuses.
    """
    export_files(directory, chain(model_files(model, tokenizer), (beside or {}).items()))


def export_files(directory: Path, files: Iterable[tuple[str, Content]]) -> None:
    """Write a new directory of these files, with its manifest. Complete or absent. Raises as `export_model` does."""
    if directory.exists():
        raise CheckpointError(f"{str(directory)!r} exists already; choose another directory")
    with _writing(directory) as new:
        for name, content in files:
            new.write(name, content)


def read_model_files(checkpoint: Manifest) -> dict[str, bytes]:
    """Return what makes a checkpoint a model directory, checked: name -> content.

    Raises DamageError for a file that is not as it was written, RemovedError for a checkpoint that was removed.
    """
    names = ("model.safetensors", "config.json", *(name for name in TOKENIZER_FILES if name in checkpoint.sha256))
    return {name: checkpoint.read(name) for name in names}


@dataclass(frozen=True, slots=True)
class _Facts:
    """Holds the content of checkpoint.json."""

    updates_done: int
    kl_coef: float | None


def save_checkpoint(directory: Path, learner: Learner, tokenizer: Path) -> str:
    """Write the learner's state durably, replacing a checkpoint of that name that the ledger no longer points to.

    Returns the digest of its manifest. Raises CheckpointError; then nothing of it is left.
    """
    with _writing(directory) as new:
        for name, content in model_files(learner.model, tokenizer):
            new.write(name, content)
        new.write("optimizer.safetensors", _tensors(_optimizer_tensors(learner)))
        for name, module in _beside(learner).items():
            new.write(f"{name}.safetensors", _tensors(saved(module)))
        facts = _Facts(learner.updates_done, None if learner.kl is None else learner.kl.coef)
        new.write(_FACTS, json.dumps(asdict(facts), indent=2).encode())
    return new.manifest_sha256


def load_checkpoint(checkpoint: Manifest, learner: Learner, tokenizer: Path) -> None:
    """Restore a learner; an export, which is only a model, gives it the weights to start from and nothing else.

    Raises DamageError for a checkpoint that is damaged, CheckpointError for one of another model or tokenizer.
    """
    where = checkpoint.directory
    _check_tokenizer(checkpoint, tokenizer)
    _check_config(learner.model, json.loads(checkpoint.read("config.json")), where)
    weights = load_safetensors(checkpoint.read("model.safetensors"))
    if _FACTS not in checkpoint.sha256:
        copy_weights(learner.model, weights, str(where))
        learner.begin_here()
        return
    facts = _Facts(**json.loads(checkpoint.read(_FACTS)))
    moments = load_safetensors(checkpoint.read("optimizer.safetensors"))
    beside = {name: load_safetensors(checkpoint.read(f"{name}.safetensors")) for name in _beside(learner)}
    copy_weights(learner.model, weights, str(where))
    for name, module in _beside(learner).items():
        copy_weights(module, beside[name], str(where))
    _restore_moments(learner, moments)
    learner.updates_done = facts.updates_done
    if learner.kl is not None and facts.kl_coef is not None:
        learner.kl = replace(learner.kl, coef=facts.kl_coef)


def _check_tokenizer(checkpoint: Manifest, tokenizer: Path) -> None:
    """Raise CheckpointError unless the configured tokenizer's files are those that went into the checkpoint."""
    for name in TOKENIZER_FILES:
        path = tokenizer / name
        if checkpoint.sha256.get(name) != (sha256_of(path.read_bytes()) if path.is_file() else None):
            raise CheckpointError(f"checkpoint {checkpoint.directory} was made with another tokenizer than {path}")


_NOT_COMPARED = {"architectures", "dtype", "transformers_version"}  # written for others, or by another transformers


def _check_config(model: PreTrainedModel, recorded: dict[str, Any], where: Path) -> None:
    """Raise CheckpointError, naming the first difference, if the configured model would compute otherwise."""
    ours, theirs = (json.loads(c.to_json_string()) for c in (model.config, type(model.config).from_dict(recorded)))
    for name in sorted((ours.keys() | theirs.keys()) - _NOT_COMPARED):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"checkpoint {where} holds another model: {name} is {theirs.get(name)!r} there, {ours.get(name)!r} in "
                "the configured model"
            )


def copy_weights(model: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Copy `weights` into the model. Raises CheckpointError, naming the first difference, if they do not fit it."""
    mine = saved(model)
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
    """Return about how many bytes a checkpoint has: weights and two moments, value head and reference if any."""
    modules = [learner.trained] * 3 + list(_beside(learner).values())
    return sum(t.numel() * t.element_size() for module in modules for t in saved(module).values())


def _beside(learner: Learner) -> dict[str, nn.Module]:
    """Return what else a learner computes with, by the name of its file."""
    reference = None if learner.reference is None else learner.reference.model
    modules = {"value_head": learner.value_head, "reference": reference}
    return {name: module for name, module in modules.items() if module is not None}


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{moment}.{name}": learner.optimizer.state[parameter][moment].contiguous()
        for name, parameter in trained(learner.trained)
        if parameter in learner.optimizer.state
        for moment in _MOMENTS
    }


def _restore_moments(learner: Learner, moments: dict[str, Tensor]) -> None:
    """Restore AdamW's moments. Parameters that never had a gradient have none; the SHA-256 shows that none is lost."""
    learner.optimizer.state.clear()
    for name, parameter in trained(learner.trained):
        if f"{_MOMENTS[0]}.{name}" in moments:
            learner.optimizer.state[parameter] = {
                moment: moments[f"{moment}.{name}"].to(parameter.device) for moment in _MOMENTS
            }


@contextmanager
def _writing(final: Path) -> Iterator[NewDirectory]:
    """Open a `new_directory`; an OSError becomes a CheckpointError."""
    try:
        with new_directory(final) as new:
            yield new
    except OSError as error:
        raise CheckpointError(
            f"could not write {final}: {error}; if the disk is full, free some space (a run then goes on with --resume)"
        ) from error


def remove_others(checkpoints: Path, keep: Iterable[str]) -> None:
    """Delete every directory under `checkpoints` whose name is not in `keep`, half-written ones included.

    To a concurrent reader each of them vanishes at once.
    """
    kept = set(keep)
    for directory in sorted(checkpoints.iterdir()):  # hidden ones first: an earlier process may have left a `.removed`
        if directory.is_dir() and directory.name not in kept:
            shutil.rmtree(directory) if directory.name.startswith(".") else remove_at_once(directory)
