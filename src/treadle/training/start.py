"""From a configuration to a `Trainer`, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule

from treadle.core.errors import ConfigError
from treadle.core.trainer import Trainer
from treadle.engines.compute import Compute
from treadle.models.model_files import tokenizer_directory
from treadle.training.config import TrainerSpec
from treadle.training.make import load_learner
from treadle.training.rank_group import start_ranks
from treadle.training.trainer import EmbeddedTrainer

MakeTrainer = Callable[[TrainerSpec], Trainer]
"""Creates the trainer of a run; default: `make_trainer`."""


def make_trainer(spec: TrainerSpec) -> Trainer:
    """Return a trainer in this process, or in `placement.learner.ranks` processes if there are several.

    In this process it computes inline if nothing is sampled meanwhile, otherwise on its own thread.
    Raises ConfigError for a model, reference or teacher that cannot be loaded or trained, DamageError for a damaged
    one.
    """
    if spec.placement.ranks > 1:
        _check_torch(spec.placement.ranks)
        return start_ranks(spec)
    compute = Compute("treadle-learner" if spec.max_staleness else None)
    return EmbeddedTrainer(load_learner(spec), tokenizer_directory(spec.model), compute, spec.warm_start)


def _check_torch(ranks: int) -> None:
    """Raise ConfigError if this PyTorch cannot train on several ranks."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"placement.learner.ranks is {ranks}, which needs torch 2.13 or newer, not {torch.__version__}; upgrade "
            "it, or set placement.learner.ranks to 1"
        )
