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
from treadle.engines.probe import ProbeResult, probe_engine
from treadle.engines.stop_strings import Decode
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.orchestration.setup.thread_count import available_cores, default_threads
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation


@dataclass(frozen=True, slots=True)
class ChatInterface:
    """Holds what turns messages into a model's token ids and back; no weights.

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
    policy, or if the engine lacks what training needs (`probe_engine`).
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
    return facts
