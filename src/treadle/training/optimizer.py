"""AdamW with the learning rate as a pure function of the update number."""

from __future__ import annotations

import math

import torch
from torch import nn

from treadle.core.errors import TrainingStopped
from treadle.models.weights import trained, whole
from treadle.training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, updates: int) -> float:
    """Return the learning rate of update `update` (from 0) out of `updates`.

    It rises linearly over `warmup` updates, stays constant, then falls as a cosine to final_lr * peak.
    """
    warm = min(1.0, (update + 1) / config.warmup) if config.warmup else 1.0
    start = config.decay_from * updates
    share = 1.0
    if update >= start and updates > start:
        progress = min(1.0, (update - start) / (updates - start))
        share = config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * warm * share


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [parameter for _, parameter in trained(model)],
        lr=config.learning_rate,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def step(optimizer: torch.optim.AdamW, model: nn.Module, config: OptimizerConfig, rate: float) -> float:
    """Clip the gradient, step the optimizer and clear the gradient; return its norm before clipping.

    Raises TrainingStopped, without changing weights, if the norm is not finite.
    """
    norm = float(whole(nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)))
    if not math.isfinite(norm):
        raise TrainingStopped(
            f"the gradient's norm is {norm} at learning rate {rate:g}; the weights were not changed. "
            "A lower learning rate or float32 precision may help"
        )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
