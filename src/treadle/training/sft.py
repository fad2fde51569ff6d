"""Supervised warm start on demonstrations, through the same packing and forward pass as RL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from treadle.core.errors import TrainingStopped
from treadle.core.types import Message
from treadle.packing.flat import Call
from treadle.packing.layout import Packing, Sharing
from treadle.rollout.chat import ChatRenderer
from treadle.training.config import WarmStartConfig
from treadle.training.demonstrations import Demonstrations, demonstrated_calls
from treadle.training.forward import Forward
from treadle.training.objective import Scores, Slopes
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
    forward = Forward(model, config.max_tokens_per_microbatch)
    optimizer = make_optimizer(model, config.optimizer)
    losses: list[float] = []
    for number in range(config.steps):
        first = number * config.batch_size
        calls = _calls([demonstrations(i) for i in range(first, first + config.batch_size)], renderer)
        tokens = sum(len(c.token_ids) - c.prompt_length for c in calls)
        temperature = torch.ones(tokens, device=model.device)

        def mean(scores: Scores, tokens: int = tokens) -> Slopes:
            return Slopes(torch.full_like(scores.logp, -1 / tokens))

        trees = forward.trees(calls, Packing.TREE, Sharing.TRAJECTORY)
        total = -sum(float(forward.backward(tree, temperature, mean).logp.sum()) for tree in trees) / tokens
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


def _calls(rows: Sequence[Sequence[Message]], renderer: ChatRenderer) -> list[Call]:
    calls: list[Call] = []
    first = 0
    for conversation, messages in enumerate(rows):
        for prompt, completion in demonstrated_calls(messages, renderer):
            calls.append(Call(np.concatenate([prompt, completion]), len(prompt), first, conversation))
            first += len(completion)
    return calls
