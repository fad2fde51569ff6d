"""Checkpoints: a Hugging Face directory plus the optimizer. Complete or absent, safetensors only, no pickle.

step-000040/  model.safetensors config.json tokenizer.json ...   loadable by transformers
              optimizer.safetensors  checkpoint.json             what resuming needs besides
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor
from transformers import PreTrainedModel

from treadle.core.errors import CheckpointError
from treadle.engines.weights import unique_weights, weights_sha256
from treadle.training.learner import Learner
from treadle.training.model import TOKENIZER_FILES, file_sha256

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def write_model(directory: Path, model: PreTrainedModel, tokenizer: Path) -> None:
    """Write weights, config and tokenizer into an existing directory, durably. Raises OSError."""
    weights = {name: tensor.contiguous() for name, tensor in unique_weights(model).items()}
    _write(directory / "model.safetensors", save_safetensors(weights, {"format": "pt"}))
    _write(directory / "config.json", model.config.to_json_string().encode())
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            _write(directory / name, (tokenizer / name).read_bytes())


def export_model(directory: Path, model: PreTrainedModel, tokenizer: Path) -> None:
    """Write a model directory that transformers and `model.path` load. Complete or absent.

    Raises CheckpointError if the directory exists or the disk refuses.
    """
    if directory.exists():
        raise CheckpointError(f"{str(directory)!r} exists already; choose another directory")
    with _complete_or_absent(directory) as temporary:
        write_model(temporary.path, model, tokenizer)


def save_checkpoint(directory: Path, learner: Learner, tokenizer: Path) -> None:
    """Write the learner's state durably. Raises CheckpointError; then nothing of it is left."""
    if directory.exists():  # of a run that was rolled back: the ledger no longer points to it
        shutil.rmtree(directory)
    with _complete_or_absent(directory) as temporary:
        write_model(temporary.path, learner.model, tokenizer)
        _write(temporary.path / "optimizer.safetensors", save_safetensors(_optimizer_tensors(learner)))
        facts = {
            "updates_done": learner.updates_done,
            "tokenizer_sha256": file_sha256(tokenizer / "tokenizer.json"),
            "weights_sha256": weights_sha256(learner.weights()),
        }
        _write(temporary.path / "checkpoint.json", json.dumps(facts, indent=2).encode())


def load_checkpoint(directory: Path, learner: Learner, tokenizer: Path) -> None:
    """Restore a learner. Raises CheckpointError for a checkpoint that is damaged or of another model or tokenizer."""
    try:
        facts: dict[str, Any] = json.loads((directory / "checkpoint.json").read_bytes())
        weights = load_safetensors((directory / "model.safetensors").read_bytes())
        moments = load_safetensors((directory / "optimizer.safetensors").read_bytes())
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(f"checkpoint {directory} cannot be read: {error}") from error
    if facts["tokenizer_sha256"] != file_sha256(tokenizer / "tokenizer.json"):
        raise CheckpointError(
            f"checkpoint {directory} was made with another tokenizer than {tokenizer / 'tokenizer.json'}"
        )
    copy_weights(learner.model, weights, str(directory))
    if weights_sha256(learner.weights()) != facts["weights_sha256"]:
        raise CheckpointError(f"checkpoint {directory} is damaged: its weights do not have the recorded SHA-256")
    _restore_moments(learner, moments, directory)
    learner.updates_done = facts["updates_done"]


def copy_weights(model: PreTrainedModel, weights: dict[str, Tensor], source: str) -> None:
    """Copy `weights` into the model. Raises CheckpointError, naming the first difference, if they are another model's."""
    mine = unique_weights(model)
    for name in sorted(mine.keys() | weights.keys()):
        have, given = mine.get(name), weights.get(name)
        if have is None or given is None or have.shape != given.shape:
            raise CheckpointError(
                f"{source} holds another model: {name} is {_shape(given)} there and {_shape(have)} in the configured model"
            )
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(weights[name])


def checkpoint_bytes(learner: Learner) -> int:
    """About how large a checkpoint is: weights and two moments."""
    return 3 * sum(t.numel() * t.element_size() for t in learner.weights().values())


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    return {
        f"{moment}.{name}": learner.optimizer.state[parameter][moment].contiguous()
        for name, parameter in learner.model.named_parameters()
        if parameter in learner.optimizer.state
        for moment in _MOMENTS
    }


def _restore_moments(learner: Learner, moments: dict[str, Tensor], directory: Path) -> None:
    learner.optimizer.state.clear()
    if not moments:  # saved before the first update
        return
    for name, parameter in learner.model.named_parameters():
        try:
            learner.optimizer.state[parameter] = {m: moments[f"{m}.{name}"] for m in _MOMENTS}
        except KeyError as error:
            raise CheckpointError(f"checkpoint {directory} has no optimizer state for {name}") from error


class _complete_or_absent:  # reads as a statement where it is used
    """A temporary directory beside `final` that becomes it on success and vanishes on failure."""

    def __init__(self, final: Path) -> None:
        self.final, self.path = final, final.with_name(f".{final.name}.tmp")

    def __enter__(self) -> _complete_or_absent:
        shutil.rmtree(self.path, ignore_errors=True)
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"could not create {self.final}: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            _fsync(self.path)
            self.path.replace(self.final)
            _fsync(self.final.parent)
            return
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"could not write {self.final}: {error}; free disk space, then --resume") from error


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _fsync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_others(checkpoints: Path, keep: Iterable[str]) -> None:
    """Delete every directory under `checkpoints` that is not to be kept, half-written ones included."""
    kept = set(keep)
    for directory in checkpoints.iterdir():
        if directory.is_dir() and directory.name not in kept:
            shutil.rmtree(directory)
