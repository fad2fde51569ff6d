"""The trained model with its tokenizer, renderer and engine, and the proof that engine and learner agree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from treadle.core.errors import EngineError
from treadle.core.types import SamplingParams
from treadle.engines.torch_engine import TorchEngine
from treadle.packing.flat import Call
from treadle.packing.layout import Packing, Sharing
from treadle.rollout.chat import ChatRenderer
from treadle.rollout.conversation import Conversation
from treadle.training.config import ModelConfig
from treadle.training.forward import Forward
from treadle.training.learner import Learner
from treadle.training.model import load_tokenizer, make_model, tokenizer_directory


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with what is needed to talk to it."""

    model: PreTrainedModel
    renderer: ChatRenderer
    tokenizer_path: Path
    stop_token_ids: tuple[int, ...]
    context: int
    decode: Any

    def engine(self, max_batch: int) -> TorchEngine:
        """An embedded engine with its own weights, on the caller's thread: learner and engine take turns."""
        return TorchEngine(
            self.model, stop_token_ids=self.stop_token_ids, decode=self.decode, max_batch=max_batch, own_thread=False
        )


def load_policy(config: ModelConfig, seed: int) -> Policy:
    """Model and tokenizer as configured. Raises ConfigError."""
    directory = tokenizer_directory(config)
    tokenizer = load_tokenizer(directory)
    model = make_model(config, len(tokenizer), seed)
    stop = (int(tokenizer.eos_token_id),)

    def decode(ids: Any) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    context = int(model.config.get_text_config().max_position_embeddings)
    renderer = ChatRenderer(
        tokenizer, stop, chat_template=config.chat_template, chat_template_kwargs=config.chat_template_kwargs
    )
    return Policy(model, renderer, directory, stop, context, decode)


def available_cores() -> int:
    """Cores this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(threads: int | None) -> None:
    """Fix torch's thread count and ask for deterministic kernels: same seed, machine and threads, same bits."""
    torch.set_num_threads(threads or available_cores())
    torch.use_deterministic_algorithms(True)


async def check_engine(engine: TorchEngine, learner: Learner, policy: Policy) -> None:
    """Sample a few tokens and score them with engine and learner: they must be the same policy.

    Raises EngineError, before the first rollout, where their log-probabilities differ by more than rounding.
    """
    await engine.publish(learner.weights(), 0)
    prompt = Conversation(policy.renderer).render([{"role": "user", "content": "ok"}]).ids
    engine.open_session("probe")
    answer = await engine.generate(prompt, SamplingParams(temperature=1.0, max_tokens=8, seed=1), session="probe")
    engine.close_session("probe")
    call = Call(np.concatenate([prompt, answer.token_ids]), len(prompt), 0)
    exact = Forward(learner.model, len(call.token_ids))  # in float32: bfloat16 rounds by more than other weights may do
    [tree] = exact.trees([call], Packing.STEP, Sharing.TRAJECTORY)
    learned = exact.scores(tree, torch.ones(len(answer.token_ids))).logp.cpu().numpy()
    scored = (await engine.score(call.token_ids))[len(prompt) - 1 :]
    for name, other in (("its own scoring pass", scored), ("the learner", learned)):
        gap = float(np.abs(answer.logprobs - other).max())
        if not gap < 1e-3:
            raise EngineError(f"the engine's log-probabilities differ from those of {name} by up to {gap:.2e}")
