"""Checkpoints: a Hugging Face directory plus the optimizer. Complete or absent, safetensors only, no pickle.

step-000040/  model.safetensors config.json tokenizer.json ...   loadable by transformers
              optimizer.safetensors  checkpoint.json             further state for resuming
              value_head, reference, teacher .safetensors        if the run has any of its own
              SHA256SUMS                                         the manifest (core.files)

Several ranks write the state beside the model as directories of shards (`checkpoint_shards`), each rank its own; any
number of ranks can read either. The model is always one file.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from treadle.core.errors import CheckpointError
from treadle.core.files import (
    MANIFEST,
    Content,
    Manifest,
    NewDirectory,
    new_directory,
    refusal,
    remove_at_once,
    sha256_of,
)
from treadle.models.chat import TOKENIZER_FILES, end_tokens
from treadle.models.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, GENERATION_CONFIG, read_generation_config
from treadle.models.tensor_file import write_tensors
from treadle.models.weights import CONFIG_NOT_COMPARED, adapter_weights, gathered, rest_of, saved, trained
from treadle.training.checkpoint_shards import InMemory, TensorSource, checkpoint_part, write_shards
from treadle.training.learner import Learner
from treadle.training.ranks import Ranks

_FACTS = "checkpoint.json"
# rewritten, or not part of the model
_NOT_COPIED = {"config.json", GENERATION_CONFIG, MANIFEST, _FACTS, ADAPTER_CONFIG}
_OF_TOKENIZER = re.compile(
    r"tokenizer(_config)?\..*|(special_tokens_map|added_tokens)\.json|vocab\.(json|txt)|merges\.txt|spiece\.model|"
    r"chat_template\..*|additional_chat_templates/.*\.jinja"
)
_WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|ot|ckpt|nemo|npz|tflite)(\.index\.json)?$|^\.")
_PARTS = ("optimizer", "value_head", "reference", "teacher")  # parts of a checkpoint beside the model
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def model_files(
    model: PreTrainedModel, tokenizer: Path, weights: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Content]]:
    """Yield name and content of the files of a model directory: weights, configs, tokenizer. Raises OSError.

    Other files of the model's directory (towers, a processor, a license) are included, except those of another
    tokenizer.
    weights: the saved weights, whole and in the order of names, if the model's own are shards.
    """
    if adapter_weights(model):
        from treadle.models.lora import adapter_files  # peft, which only adapters need

        yield ADAPTER_WEIGHTS, _weights(model, weights)
        yield from adapter_files(model)
        yield from _tokenizer_files(tokenizer)
        return
    yield "model.safetensors", _weights(model, weights)
    config = json.loads(model.config.to_json_string())
    # Inference engines choose the class by `architectures`, which only loaded models have.
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    yield "config.json", json.dumps(config, indent=2, sort_keys=True).encode()
    yield from _tokenizer_files(tokenizer)
    origin = Path(model.name_or_path) if model.name_or_path else tokenizer
    if ends := end_tokens(vars(model.generation_config or GenerationConfig())):
        original = read_generation_config(origin)
        generation = original if set(end_tokens(original)) == set(ends) else {**original, "eos_token_id": ends}
        yield GENERATION_CONFIG, json.dumps(generation, indent=2).encode()
    if not model.name_or_path:
        # A built model has its processor beside the tokenizer.
        yield from ((path.name, path.read_bytes()) for path in sorted(tokenizer.glob("*processor_config.json")))
        return
    for path in sorted(origin.iterdir()):
        left = path.name in _NOT_COPIED or _OF_TOKENIZER.fullmatch(path.name)
        if path.is_file() and not left and not _WEIGHTS.search(path.name):
            yield path.name, path.read_bytes()


def _tokenizer_files(tokenizer: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted({tokenizer / "tokenizer.json", *tokenizer.glob("*"), *tokenizer.glob("*/*.jinja")}):
        name = path.relative_to(tokenizer).as_posix()
        if _OF_TOKENIZER.fullmatch(name) and (path.is_file() or name == "tokenizer.json"):
            yield name, path.read_bytes()


def _weights(model: PreTrainedModel, whole: Iterable[tuple[str, Tensor]] | None) -> Content:
    rest = rest_of(model)
    if whole is None:
        everything = {**saved(model), **rest}
        return _tensors({name: tensor.contiguous() for name, tensor in everything.items()}, {"format": "pt"})
    shapes = {**saved(model), **rest}
    return lambda path: write_tensors(path, shapes, chain(whole, rest.items()), {"format": "pt"})


def _tensors(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Content:
    """Return a function that writes a safetensors file directly from the tensors, without a second copy of them."""

    def write(path: Path) -> None:
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:
            # safetensors raises its own error for a full disk.
            raise OSError(str(error)) from error

    return write


def export_model(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: Path,
    beside: Mapping[str, Content] | None = None,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write a model directory for transformers and `model.path`, with additional files by name. Complete or absent.

    weights: see `model_files`. Raises CheckpointError if the directory exists or the disk refuses.
    """
    export_files(directory, chain(model_files(model, tokenizer, weights), (beside or {}).items()))


def export_files(directory: Path, files: Iterable[tuple[str, Content]]) -> None:
    """Write a new directory of these files, with its manifest. Complete or absent. Raises as `export_model` does."""
    if directory.exists():
        raise CheckpointError(f"{str(directory)!r} exists already; choose another directory")
    with _writing(directory) as new:
        for name, content in files:
            new.write(name, content)


def read_model_files(checkpoint: Manifest) -> dict[str, bytes]:
    """Return the checked files that make a checkpoint a model directory: name -> content.

    Raises DamageError for a damaged file, RemovedError for a removed checkpoint.
    """
    parts = (_FACTS, *(f"{part}{end}" for part in _PARTS for end in (".", "/")))
    return {name: checkpoint.read(name) for name in checkpoint.sha256 if not name.startswith(parts)}


@dataclass(frozen=True, slots=True)
class _Facts:
    """The content of checkpoint.json. teacher_sha256: digest of a teacher outside the checkpoint."""

    updates_done: int
    kl_coef: float | None
    teacher_sha256: str | None = None


def save_checkpoint(directory: Path, learner: Learner, tokenizer: Path) -> str:
    """Write the learner's state durably, replacing a checkpoint of that name that the ledger no longer references.

    All ranks do this together: the first one writes the directory, each one its shards of the state beside the weights.
    Returns the digest of the manifest. Raises CheckpointError, leaving nothing behind.
    """
    if learner.ranks.size > 1:
        return _save_shards(directory, learner, tokenizer)
    with _writing(directory) as new:
        for name, content in model_files(learner.model, tokenizer):
            new.write(name, content)
        for part, tensors in _parts(learner).items():
            new.write(f"{part}.safetensors", _tensors(tensors))
        new.write(_FACTS, _facts(learner))
    return new.manifest_sha256


def write_adapter(directory: Path, model: PreTrainedModel, tokenizer: Path, optimizer: dict[str, Tensor]) -> None:
    """Write a model directory with the tensors of an optimizer, replacing an existing one. Raises CheckpointError."""
    with _writing(directory) as new:
        for name, content in model_files(model, tokenizer):
            new.write(name, content)
        new.write("optimizer.safetensors", _tensors(optimizer))


def _save_shards(directory: Path, learner: Learner, tokenizer: Path) -> str:
    ranks = learner.ranks
    with ExitStack() as writing:

        def begin(weights: Iterator[tuple[str, Tensor]]) -> NewDirectory:
            new = writing.enter_context(_writing(directory))
            with _as_checkpoint_error(directory):
                for name, content in model_files(learner.model, tokenizer, weights):
                    new.write(name, content)
            return new

        def write(part: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
            with _as_checkpoint_error(directory):
                return write_shards(folder, part, tensors, ranks)

        def end(_: Iterator[None]) -> str:
            with _as_checkpoint_error(directory):
                for name, sha256 in chain.from_iterable(digests.items() for digests in written):
                    new.note(name, sha256)
                new.write(_FACTS, _facts(learner))
            writing.close()
            return new.manifest_sha256

        new = ranks.first(begin, gathered(saved(learner.model)))
        folder = ranks.every(lambda: new.path if ranks.rank == 0 else Path())[0]
        written = [digests for part in _parts(learner).items() for digests in ranks.every(partial(write, *part))]
        return ranks.first(end, iter(()))


def _parts(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a checkpoint beside the model's, by names of parts."""
    return {"optimizer": optimizer_tensors(learner.optimizer, learner.trained)} | _beside(learner)


def _facts(learner: Learner) -> bytes:
    coef = None if learner.kl is None else learner.kl.coef
    facts = _Facts(learner.updates_done, coef, _teacher_sha256(learner))
    return json.dumps(asdict(facts), indent=2).encode()


def _teacher_sha256(learner: Learner) -> str | None:
    return None if learner.teacher is None else learner.teacher.sha256


def load_checkpoint(checkpoint: Manifest, learner: Learner, tokenizer: Path) -> None:
    """Restore a learner; an export, which has only a model, provides initial weights and nothing else.

    Any number of ranks can read what any other number wrote.
    Raises DamageError for a damaged checkpoint, CheckpointError for another model, tokenizer or teacher.
    """
    where = checkpoint.directory
    _check_tokenizer(checkpoint, tokenizer)
    if adapter_weights(learner.model):
        from treadle.models.lora import check_adapter  # peft, which only adapters need

        check_adapter(learner.model, checkpoint)
        weights = read_part(checkpoint, "adapter_model", learner.ranks)
    else:
        if "config.json" not in checkpoint.sha256:
            raise CheckpointError(f"checkpoint {where} holds an adapter, and training.lora is not set")
        _check_config(learner.model, json.loads(checkpoint.read("config.json")), where)
        weights = read_part(checkpoint, "model", learner.ranks)
    if _FACTS not in checkpoint.sha256:
        copy_weights(saved(learner.model), weights, str(where), rest_of(learner.model))
        learner.begin_here()
        return
    facts = _Facts(**json.loads(checkpoint.read(_FACTS)))
    if facts.teacher_sha256 not in (None, _teacher_sha256(learner)):
        raise CheckpointError(
            f"checkpoint {where} learned from another teacher: weights or configuration in algorithm.distillation."
            "teacher have changed since the run's start; restore them, or start a new run (model.path may be "
            "this checkpoint)"
        )
    moments = read_part(checkpoint, "optimizer", learner.ranks)
    beside = {name: read_part(checkpoint, name, learner.ranks) for name in _beside(learner)}
    copy_weights(saved(learner.model), weights, str(where), rest_of(learner.model))
    for name, tensors in _beside(learner).items():
        copy_weights(tensors, beside[name], str(where))
    restore_moments(learner.optimizer, learner.trained, moments)
    learner.updates_done = facts.updates_done
    if learner.kl is not None and facts.kl_coef is not None:
        learner.kl = replace(learner.kl, coef=facts.kl_coef)


def read_part(checkpoint: Manifest, part: str, ranks: Ranks) -> TensorSource:
    """Return the checked tensors of a part, to be read by all ranks. Raises DamageError."""
    if ranks.size == 1 and f"{part}.safetensors" in checkpoint.sha256:
        return InMemory(load_safetensors(checkpoint.read(f"{part}.safetensors")))
    return checkpoint_part(checkpoint, part, ranks)


def _check_tokenizer(checkpoint: Manifest, tokenizer: Path) -> None:
    """Raise CheckpointError unless the configured tokenizer's files equal those in the checkpoint."""
    for name in TOKENIZER_FILES:
        path = tokenizer / name
        if checkpoint.sha256.get(name) != (sha256_of(path.read_bytes()) if path.is_file() else None):
            raise CheckpointError(f"checkpoint {checkpoint.directory} was made with another tokenizer than {path}")


def _check_config(model: PreTrainedModel, recorded: dict[str, Any], where: Path) -> None:
    """Raise CheckpointError, naming the first difference, if the configured model would compute differently."""
    ours, theirs = (json.loads(c.to_json_string()) for c in (model.config, type(model.config).from_dict(recorded)))
    for name in sorted((ours.keys() | theirs.keys()) - CONFIG_NOT_COMPARED):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"checkpoint {where} holds another model: {name} is {theirs.get(name)!r} there, {ours.get(name)!r} in "
                "the configured model"
            )


def copy_weights(
    mine: Mapping[str, Tensor], weights: TensorSource, source: str, rest: Mapping[str, Tensor] | None = None
) -> None:
    """Copy `weights` into `mine`. rest: further weights required in the source, with equal values.

    Raises CheckpointError, naming the first difference, if they do not fit.
    """
    rest = rest or {}
    shapes = {name: tensor.shape for name, tensor in (*mine.items(), *rest.items())}
    for name in sorted(shapes.keys() | weights.shapes.keys()):
        ours, theirs = shapes.get(name), weights.shapes.get(name)
        if ours is None or theirs is None or ours != theirs:
            raise CheckpointError(
                f"{source} holds another model: {name} is {_shape(theirs)} there, "
                f"{_shape(ours)} in the configured model"
            )
    there = {name: torch.empty_like(tensor) for name, tensor in rest.items()}
    weights.read_into(there)
    if changed := [name for name, tensor in rest.items() if not _same_bits(tensor, there[name])]:
        raise CheckpointError(
            f"{source} holds another model: {changed[0]}, which is not trained, has other values than the files of "
            "the configured model; restore those, or start a new run (model.path may be this checkpoint)"
        )
    weights.read_into(mine)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def checkpoint_bytes(learner: Learner) -> int:
    """Return the approximate size of a checkpoint: weights, two moments and further state, in bytes."""
    moved = [parameter for _, parameter in trained(learner.trained)]
    tensors = [
        *saved(learner.trained).values(),
        *rest_of(learner.model).values(),
        *moved,
        *moved,
        *(t for p in _beside(learner).values() for t in p.values()),
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _beside(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a learner's further state, by file name."""
    head = {} if learner.value_head is None else saved(learner.value_head)
    reference, teacher = ({} if each is None else each.weights() for each in (learner.reference, learner.teacher))
    parts = {"value_head": head, "reference": reference, "teacher": teacher}
    return {name: tensors for name, tensors in parts.items() if tensors}


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(tuple(shape))


def optimizer_tensors(optimizer: torch.optim.AdamW, module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's optimizer, by moment and name of the weight."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in trained(module)
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


def restore_moments(optimizer: torch.optim.AdamW, module: nn.Module, moments: TensorSource) -> None:
    """Restore AdamW's moments. Parameters that never had a gradient have none; the SHA-256 proves that none is lost."""
    state, restored = optimizer.state, dict[str, Tensor]()
    state.clear()
    for name, parameter in trained(module):
        if f"{_MOMENTS[0]}.{name}" in moments.shapes:
            step = torch.zeros(())  # on the CPU, like AdamW's own
            zeros = (torch.zeros_like(parameter), torch.zeros_like(parameter), step)
            state[parameter] = dict(zip(_MOMENTS, zeros, strict=True))
            restored |= {f"{moment}.{name}": tensor for moment, tensor in state[parameter].items()}
    moments.read_into(restored)


@contextmanager
def _as_checkpoint_error(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        resumes = " (the run then continues with --resume)" if final.name.startswith("step-") else ""
        raise CheckpointError(f"could not write {final}: {refusal(error)}{resumes}") from error


@contextmanager
def _writing(final: Path) -> Iterator[NewDirectory]:
    """Open a `new_directory`; an OSError becomes a CheckpointError."""
    with _as_checkpoint_error(final), new_directory(final) as new:
        yield new


def remove_others(checkpoints: Path, keep: Iterable[str]) -> None:
    """Delete every directory under `checkpoints` with a name not in `keep`, including partial ones.

    For concurrent readers, each of them vanishes at the same moment.
    """
    kept = set(keep)
    # Hidden ones first: a killed process may have left a `.removed`.
    for directory in sorted(checkpoints.iterdir()):
        if directory.is_dir() and directory.name not in kept:
            shutil.rmtree(directory) if directory.name.startswith(".") else remove_at_once(directory)
