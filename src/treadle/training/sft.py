"""Supervised warm start on demonstrations, through the same packing and forward pass as RL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from treadle.core.errors import TrainingStopped
from treadle.core.types import Message
from treadle.packing.flat import Span
from treadle.packing.layout import MicroBatch, Packing, micro_batches, pack
from treadle.rollout.chat import ChatRenderer
from treadle.training.config import WarmStartConfig
from treadle.training.demonstrations import Demonstrations, demonstrated_calls
from treadle.training.forward import prepare, token_logprobs
from treadle.training.optimizer import learning_rate, make_optimizer, step


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """loss: mean over the last 10% of steps, nats a token."""

    loss: float
    steps: int


def warm_start(
    model: PreTrainedModel,
    renderer: ChatRenderer,
    demonstrations: Demonstrations,
    config: WarmStartConfig,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> WarmStartResult:
    """Train the model in place, loss on assistant tokens only, `token_mean` over each step's conversations.

    on_step(step, loss) is called after each step. Raises TrainingStopped if the final loss is above `config.max_loss`.
    """
    prepare(model, gradient_checkpointing=False)
    optimizer = make_optimizer(model, config.optimizer)
    losses: list[float] = []
    for number in range(config.steps):
        first = number * config.batch_size
        parts = _batch([demonstrations(i) for i in range(first, first + config.batch_size)], renderer, config)
        tokens = sum(len(part.flat) for part in parts)
        total = 0.0
        for part in parts:
            logp, _entropy = token_logprobs(model, part, torch.ones(len(part.flat), dtype=torch.float32))
            loss = -logp.sum() / tokens
            loss.backward()
            total += loss.item()
        step(optimizer, model, config.optimizer, learning_rate(config.optimizer, number, config.steps))
        losses.append(total)
        on_step(number + 1, total)
    final = float(np.mean(losses[-max(1, config.steps // 10) :]))
    if config.max_loss is not None and not final <= config.max_loss:
        raise TrainingStopped(
            f"the warm start did not learn its demonstrations: loss {final:.3f} after {config.steps} steps, "
            f"warm_start.max_loss is {config.max_loss}; RL would have nothing to amplify. "
            "Try more steps, another learning rate or another seed"
        )
    return WarmStartResult(final, config.steps)


def _batch(rows: Sequence[Sequence[Message]], renderer: ChatRenderer, config: WarmStartConfig) -> list[MicroBatch]:
    calls: list[Span] = []
    first = 0
    for owner, messages in enumerate(rows):
        for prompt, completion in demonstrated_calls(messages, renderer):
            calls.append(Span(prompt, completion, first, owner))
            first += len(completion)
    return micro_batches(pack(calls, Packing.CHAIN), config.max_tokens_per_microbatch)
