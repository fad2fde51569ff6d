"""From a configuration to a learner, or to a source of untrained weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from treadle.algorithms.config import DistillationConfig
from treadle.core.errors import ConfigError
from treadle.engines.compute import Compute
from treadle.models.chat import load_chat, load_tokenizer
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.loading import load_frozen, load_teacher, make_model
from treadle.models.model_files import require_model, tokenizer_directory
from treadle.models.support import context_of
from treadle.models.towers import frozen_tower, tower_of, trained_tower
from treadle.models.vision import Tower
from treadle.training.checkpoint_shards import read_sharded
from treadle.training.config import TrainerSpec
from treadle.training.frozen import make_reference, make_teacher
from treadle.training.learner import Learner
from treadle.training.objective import TracedGroups
from treadle.training.ranks import Ranks, ReadWeights
from treadle.training.teacher_prompts import TeacherPrompts, Truths
from treadle.training.trainer import EmbeddedSource

if TYPE_CHECKING:
    from treadle.rollout.other_models import OtherModelConfig
    from treadle.training.teacher_server import TeacherServer


def load_learner(spec: TrainerSpec, ranks: Ranks | None = None) -> Learner:
    """Return a learner of the configured model, or this rank's part of it. Raises as `make_trainer`.

    Of several ranks, the first one reads the weights; the others have only shapes until the model is sharded. With
    `placement.learner.loading` sharded, all of them have only shapes at first.
    """
    first, kl = ranks is None or ranks.rank == 0, spec.algorithm.kl
    read = _read_sharded(spec.model, ranks) if ranks is not None and spec.placement.loading == "sharded" else None
    half = spec.training.precision == "bfloat16_pure"
    whole, weights = spec.training.trains_tower, first and read is None
    model = load_model(spec.model, spec.seed, spec.training.lora, half, weights, whole)
    vision = trained_tower(spec.model, model) if whole else tower_of(spec.model, spec.device)
    reference = None if spec.reference is None else load_frozen(spec.reference, "algorithm.kl.model", model, first)
    distillation = spec.algorithm.distillation
    teacher = prompts = server = truths = None
    if distillation is not None and spec.teacher is not None and spec.teacher.url is not None:
        server = reach_teacher(spec.teacher, distillation, spec.model, spec.longest_call) if first else None
    elif spec.teacher is not None and spec.teacher.path is not None:
        teacher = load_teacher(spec.teacher.path, spec.model, model, first)
    if distillation is not None and distillation.context is not None:
        limit = context_of((teacher or model).config)
        limit = limit if server is None else server.context
        prompts = TeacherPrompts(distillation.context, load_chat(spec.model, spec.began)[1], limit)
    if distillation is not None and distillation.form == "turns":
        limit = context_of((teacher or model).config) if server is None else server.context
        truths = Truths(distillation.target, load_chat(spec.model, spec.began)[1], limit)
    if spec.placement.ranks == 1:
        for module in (model, reference, teacher):
            if module is not None:
                module.to(spec.device)  # type: ignore[arg-type]  # a wrapper hides the signature
    return Learner(
        model,
        spec.training,
        spec.algorithm,
        spec.updates,
        reference=make_reference(kl, model, reference, _tower_of(reference, spec)),
        teacher=make_teacher(distillation, model, teacher, server, prompts, truths, _tower_of(teacher, spec)),
        ranks=ranks,
        # All ranks would record the same traces.
        traced=TracedGroups(spec.seed, spec.traced_groups if first else 0.0),
        read=read,
        vision=vision,
    )


def _tower_of(model: PreTrainedModel | None, spec: TrainerSpec) -> Tower | None:
    """Return the tower of a reference or teacher; None without one."""
    return (
        None
        if model is None
        else frozen_tower(Path(str(model.name_or_path)), tokenizer_directory(spec.model), device=spec.device)
    )


def reach_teacher(
    config: OtherModelConfig, section: DistillationConfig, policy: ModelConfig, longest_call: int
) -> TeacherServer:
    """Return the teacher behind a URL, checked. longest_call: maximum length of its calls. Raises ConfigError."""
    from treadle.training.teacher_server import TeacherServer  # httpx

    assert config.url is not None
    server = TeacherServer(
        config.url, model=config.model, api_key_env=config.api_key_env, concurrency=config.concurrency
    )
    longest, k = 0 if section.context else longest_call, section.top_k if section.by_top_k else 0
    server.check(load_tokenizer(tokenizer_directory(policy)), longest, k)
    return server


def _read_sharded(config: ModelConfig, ranks: Ranks) -> ReadWeights:
    """Return a function that reads each rank's shards of the configured model. Raises ConfigError without files."""
    if config.path is None:
        raise ConfigError(
            "placement.learner.loading is 'sharded', and model.build has no files to read; set "
            "placement.learner.loading to broadcast"
        )
    return partial(read_sharded, directory=require_model(config.path, "model.path"), ranks=ranks)


def load_source(config: ModelConfig, seed: int) -> EmbeddedSource:
    """Return the configured model, for sampling only. Raises ConfigError or DamageError."""
    vision = tower_of(config, "cpu")
    return EmbeddedSource(load_model(config, seed), tokenizer_directory(config), Compute(None), vision=vision)


def load_model(
    config: ModelConfig,
    seed: int,
    lora: LoraConfig | None = None,
    half: bool = False,
    weights: bool = True,
    whole: bool = False,
) -> PreTrainedModel:
    """Return the configured model, large enough for its tokenizer.

    lora: add trainable adapters; half: with the base in bfloat16 (`models.lora`). weights, whole: see `make_model`.
    Raises ConfigError or DamageError.
    """
    tokenizer, renderer = load_chat(config, None)  # no text is rendered
    model = make_model(config, len(tokenizer), seed, weights, lora, half, whole)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = list(renderer.stop_ids)  # exports end replies as here
    return model
