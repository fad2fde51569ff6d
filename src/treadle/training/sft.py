"""Supervised warm start on demonstrations, through the same packing and forward pass as RL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treadle.core.errors import TrainingStopped
from treadle.core.images import ImageIds
from treadle.core.trainer import Conversation, Trainer
from treadle.packing.flat import PackedCall
from treadle.packing.layout import Packing, Sharing, slots
from treadle.training.config import WarmStartConfig
from treadle.training.forward import Forward
from treadle.training.objective import LossGradients, TokenScores
from treadle.training.optimizer import learning_rate, make_optimizer, step
from treadle.training.ranks import OneRank, Ranks


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """Result of a warm start. loss: mean over the last 10% of steps, in nats per token."""

    loss: float
    steps: int


async def warm_start(
    trainer: Trainer,
    conversations: Callable[[int], Conversation],
    config: WarmStartConfig,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> WarmStartResult:
    """Run the trainer's warm-start steps, each on the next `batch_size` conversations.

    conversations: number i as a function of i, from 0.
    Calls on_step(step, loss) after each step. Raises TrainingStopped if the final loss exceeds `config.max_loss`.
    """
    losses: list[float] = []
    for number in range(config.steps):
        first = number * config.batch_size
        rows = [conversations(i) for i in range(first, first + config.batch_size)]
        losses.append(await trainer.supervised_step(rows, number))
        on_step(number + 1, losses[-1])
        # Otherwise a trainer that computes inline would never let Ctrl-C through.
        await asyncio.sleep(0)
    final = float(np.mean(losses[-max(1, config.steps // 10) :]))
    if config.max_loss is not None and not final <= config.max_loss:
        raise TrainingStopped(
            f"the warm start did not learn its demonstrations: loss {final:.3f} after {config.steps} steps, "
            f"warm_start.max_loss is {config.max_loss}; RL would have nothing to amplify. "
            "Try more steps, another learning rate or another seed"
        )
    return WarmStartResult(final, config.steps)


class Supervised:
    """Makes the steps of a warm start, with their optimizer: loss only on completions, `token_mean` in each step."""

    def __init__(self, forward: Forward, config: WarmStartConfig, ranks: Ranks | None = None) -> None:
        self.config, self._ranks = config, ranks or OneRank()
        self._forward = forward
        self._optimizer = make_optimizer(forward.model, config.optimizer)

    def step(self, conversations: Sequence[Conversation], number: int) -> float:
        """Make step `number` (from 0); return the mean loss before it, in nats per token. Raises TrainingStopped."""
        model, config = self._forward.model, self.config
        calls = _calls(conversations)
        tokens = sum(len(c.token_ids) - c.prompt_length for c in calls)
        temperature = torch.ones(tokens, device=model.device)

        def mean(scores: TokenScores) -> LossGradients:
            return LossGradients(torch.full_like(scores.logp, -1 / tokens))

        trees = self._forward.trees(calls, Packing.TREE, Sharing.TRAJECTORY)
        parts = [
            self._forward.backward(slot.trees[self._ranks.rank], temperature, mean, passes=slot.passes)
            for slot in slots(trees, self._ranks.size, self._forward.passes)
        ]
        loss = -self._ranks.add(sum(float(scores.logp.sum()) for scores in parts)) / tokens
        step(self._optimizer, model, config.optimizer, learning_rate(config.optimizer, number, config.steps))
        return loss


def _calls(conversations: Sequence[Conversation]) -> list[PackedCall]:
    calls: list[PackedCall] = []
    first, table = 0, ImageIds()
    for number, conversation in enumerate(conversations):
        for prompt, completion, *images in conversation:
            calls.append(PackedCall.of(prompt, completion, first, number, images=images, table=table))
            first += len(completion)
    return calls
