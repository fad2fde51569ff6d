"""Supervised warm start on demonstrations, through the same packing and forward pass as RL."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from treadle.core.draws import permutation
from treadle.core.errors import ConfigError, DataError, TrainingStopped
from treadle.core.registry import resolve
from treadle.core.types import Ids, Message, as_messages
from treadle.packing.flat import Span
from treadle.packing.layout import MicroBatch, Packing, micro_batches, pack
from treadle.rollout.chat import ChatRenderer
from treadle.training.config import WarmStartConfig
from treadle.training.forward import prepare, token_logprobs
from treadle.training.optimizer import learning_rate, make_optimizer, step

Demonstrations = Callable[[int], Sequence[Message]]


def load_demonstrations(source: str, options: dict[str, Any], seed: int) -> Demonstrations:
    """Conversation number i, for any i >= 0, from a .jsonl file (shuffled anew each pass) or a generator.

    A generator is `demonstration(index, seed, **options) -> messages`. Raises ConfigError or DataError.
    """
    if source.endswith(".jsonl"):
        return _from_file(Path(source), seed)
    generate = resolve("demonstrations", source)
    try:
        inspect.signature(generate).bind(0, seed, **options)
    except TypeError as error:
        raise ConfigError(f"warm_start.options {options} do not fit {source!r}: {error}") from error
    return lambda index: generate(index, seed, **options)


def _from_file(path: Path, seed: int) -> Demonstrations:
    if not path.is_file():
        raise ConfigError(f"warm_start.demonstrations: no file {str(path)!r}")
    rows: list[tuple[Message, ...]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict) or "messages" not in row:
            raise DataError(f"{path}:{number}: needs a 'messages' list")
        rows.append(as_messages(row["messages"], f"{path}:{number}"))
    if not rows:
        raise DataError(f"{path} has no demonstrations")
    return lambda index: rows[permutation(len(rows), seed, index // len(rows))[index % len(rows)]]


def demonstrated_calls(messages: Sequence[Message], renderer: ChatRenderer) -> list[tuple[Ids, Ids]]:
    """The (prompt ids, completion ids) of each assistant turn, rendered as a session would have recorded them.

    Raises DataError for a conversation without an assistant turn.
    """
    calls: list[tuple[Ids, Ids]] = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not calls:
            prompt = renderer.first(messages[:at])
        else:
            known = max(i for i in range(at) if messages[i]["role"] == "assistant")
            prompt = renderer.next(np.concatenate(calls[-1]), messages[:known], messages[known + 1 : at])
        calls.append((prompt, renderer.reply(message["content"])))
    if not calls:
        raise DataError(f"a demonstration has no assistant turn: {messages!r:.200}")
    return calls


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
            loss.backward()  # type: ignore[no-untyped-call]
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
