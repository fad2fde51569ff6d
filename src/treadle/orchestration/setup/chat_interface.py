"""What turns messages into a model's token ids and back, and the check that an engine samples the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import torch

from treadle.core.engine import Engine
from treadle.core.errors import EngineError
from treadle.core.trainer import Trainer, WeightSync
from treadle.core.types import Routing
from treadle.engines.probe import ProbeResult, probe_engine
from treadle.engines.torch.batch import Decode
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.orchestration.setup.thread_count import available_cores, default_threads
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation

_LEAST_AGREEMENT = 0.8  # of the experts of engine and learner; a judgement: rounding decides where two are as good


@dataclass(frozen=True, slots=True)
class ChatInterface:
    """Turns messages into a model's token ids and back; has no weights.

    stop_token_ids: those after which a completion ends. decode: ids -> text, special tokens included.
    """

    renderer: ChatRenderer
    stop_token_ids: tuple[int, ...]
    decode: Decode


def load_chat_interface(config: ModelConfig, began: str = "") -> ChatInterface:
    """Return the interface of the configured tokenizer and chat template. Raises ConfigError or DamageError.

    began: the run's beginning, for templates that write a date; default: each conversation's.
    """
    tokenizer, renderer = load_chat(config, datetime.fromisoformat(began) if began else None)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return ChatInterface(renderer, renderer.stop_ids, decode)


def use_threads(threads: int | None, parameters: int, ranks: int = 1) -> int:
    """Set torch's thread count and deterministic kernels, so that seed, machine and threads determine every bit.

    threads: None for `default_threads` of a model of so many parameters. ranks: that compute side by side, with as many
    threads each. Returns the number.
    """
    number = threads or default_threads(parameters, max(1, available_cores() // ranks))
    torch.set_num_threads(number)
    torch.use_deterministic_algorithms(True)
    return number


async def check_engine(
    engine: Engine, weight_sync: WeightSync, trainer: Trainer, chat: ChatInterface, tolerance: float = 1e-3
) -> ProbeResult:
    """Publish to the engine, probe it and have the trainer score what it sampled; returns what the probe found.

    Raises EngineError if their log-probabilities differ by `tolerance` nats or more, so that they are not the same
    policy, if the engine lacks what training needs (`probe_engine`), or, where experts are replayed, if those it
    reports are not the learner's.
    """
    await weight_sync.publish(0)
    prompt = Conversation(chat.renderer).render([{"role": "user", "content": "ok"}]).ids
    facts = await probe_engine(engine, prompt, stop_token_ids=chat.stop_token_ids, version=0, tolerance=tolerance)
    ids = np.concatenate([prompt, facts.sampled.token_ids])
    learned = (await trainer.score(ids))[len(prompt) - 1 :]
    gap = float(np.abs(facts.sampled.logprobs - learned).max())
    if not gap < tolerance:
        raise EngineError(
            f"{facts.engine} reports log-probabilities that differ from those of the learner by up to {gap:.2e}; "
            "it must serve the published weights in the learner's precision"
        )
    if trainer.model.expert_layers is not None:
        _check_experts(facts, (await trainer.experts(ids))[len(prompt) - 1 : -1])
    return facts


def _check_experts(facts: ProbeResult, chosen: Routing) -> None:
    """Raise EngineError unless the engine reports the experts that the learner chose: int16[C, M, k], in any order."""
    reported = facts.sampled.routing
    if reported is None:
        raise EngineError(
            f"{facts.engine} does not report the experts it chose; use an engine that does, or set "
            "training.routing_replay to false"
        )
    if reported.shape != chosen.shape:
        raise EngineError(
            f"{facts.engine} reports experts of shape {reported.shape}, the learner chooses {chosen.shape} (sampled "
            "tokens, layers, experts a token); it must serve the learner's model and report each sampled token"
        )
    agreement = float((reported[..., None] == chosen[..., None, :]).any(-1).mean())
    if agreement < _LEAST_AGREEMENT:
        raise EngineError(
            f"{facts.engine} reports experts of which the learner chooses only {agreement:.0%}; a row must be of the "
            "token before the sampled one, and layers in the model's order"
        )
