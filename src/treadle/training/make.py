"""Makes what holds a model from a configuration: a `Trainer`, or a source of weights that are not trained."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from treadle.core.trainer import Trainer
from treadle.engines.compute import Compute
from treadle.models.config import ModelConfig
from treadle.models.loading import load_reference, load_tokenizer, make_model
from treadle.models.model_files import tokenizer_directory
from treadle.training.config import TrainerSpec
from treadle.training.learner import Learner
from treadle.training.trainer import EmbeddedSource, EmbeddedTrainer

MakeTrainer = Callable[[TrainerSpec], Trainer]
"""Makes the trainer of a run; `make_trainer`, unless another one is given."""


def make_trainer(spec: TrainerSpec) -> Trainer:
    """Return a trainer in this process. It computes inline if nothing is sampled meanwhile, else on its own thread.

    Raises ConfigError for a model or a reference model that cannot be loaded or trained; DamageError for a damaged one.
    """
    model, kl = load_model(spec.model, spec.seed), spec.algorithm.kl
    reference = None if kl is None or kl.model is None else load_reference(kl.model, model)
    learner = Learner(model, spec.training, spec.algorithm, spec.updates, reference)
    compute = Compute("treadle-learner" if spec.max_staleness else None)
    return EmbeddedTrainer(learner, tokenizer_directory(spec.model), compute, spec.warm_start)


def load_source(config: ModelConfig, seed: int) -> EmbeddedSource:
    """Return the configured model, to be sampled from and not trained. Raises ConfigError or DamageError."""
    return EmbeddedSource(load_model(config, seed), tokenizer_directory(config), Compute(None))


def load_model(config: ModelConfig, seed: int) -> PreTrainedModel:
    """Return the configured model, large enough for its tokenizer. Raises ConfigError or DamageError."""
    return make_model(config, len(load_tokenizer(tokenizer_directory(config))), seed)
