"""The trained model with its tokenizer, renderer and engine, and the proof that engine and learner agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from treadle.core.engine import Engine
from treadle.core.errors import EngineError
from treadle.core.types import Floats, Ids
from treadle.engines.config import EngineConfig
from treadle.engines.probe import EngineFacts, probe_engine
from treadle.engines.torch_engine import TorchEngine
from treadle.orchestration.threads import available_cores, default_threads
from treadle.packing.flat import Call
from treadle.packing.layout import Packing, Sharing
from treadle.rollout.chat import ChatRenderer
from treadle.rollout.conversation import Conversation
from treadle.training.config import ModelConfig
from treadle.training.forward import Forward
from treadle.training.learner import Learner
from treadle.training.model import load_tokenizer, make_model
from treadle.training.model_files import tokenizer_directory


@dataclass(frozen=True, slots=True)
class Policy:
    """A model with what is needed to talk to it."""

    model: PreTrainedModel
    renderer: ChatRenderer
    tokenizer_path: Path
    stop_token_ids: tuple[int, ...]
    context: int
    decode: Any

    def engine(self, config: EngineConfig, routing: bool = False) -> TorchEngine:
        """An embedded engine with its own weights. routing: it tells which experts were chosen.

        In lock-step it computes on the caller's thread: learner and engine take turns. Otherwise on one of its own,
        beside whatever the sessions do.
        """
        lock_step = config.lock_step is not False
        return TorchEngine(
            self.model,
            stop_token_ids=self.stop_token_ids,
            decode=self.decode,
            max_batch=config.batch,
            dtype=getattr(torch, config.dtype),
            lock_step=lock_step,
            in_flight=config.in_flight,
            own_thread=not lock_step,
            routing=routing,
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


def use_threads(threads: int | None, model: PreTrainedModel) -> int:
    """Fix torch's thread count and ask for deterministic kernels: same seed, machine and threads, same bits.

    threads: default: `default_threads` for this model. Returns the number.
    """
    number = threads or default_threads(sum(p.numel() for p in model.parameters()), available_cores())
    torch.set_num_threads(number)
    torch.use_deterministic_algorithms(True)
    return number


def exact_logprobs(model: PreTrainedModel, ids: Ids) -> Floats:
    """Log-probability of ids[1:] by the learner's forward pass: int32[T] -> float32[T - 1].

    In float32 whatever the training's precision: bfloat16 rounds by more than other weights may do.
    """
    exact = Forward(model, len(ids))
    [tree] = exact.trees([Call(ids, 1, 0)], Packing.STEP, Sharing.TRAJECTORY)
    return np.asarray(exact.scores(tree, torch.ones(len(ids) - 1)).logp.cpu().numpy(), np.float32)


async def check_engine(engine: Engine, learner: Learner, policy: Policy, tolerance: float = 1e-3) -> EngineFacts:
    """Probe the engine and score what it sampled with the learner: they must be the same policy.

    Raises EngineError, before the first rollout, where their log-probabilities differ by more than the tolerance, or
    the engine lacks what training needs (`probe_engine`).
    """
    await engine.publish(learner.weights(), 0)
    prompt = Conversation(policy.renderer).render([{"role": "user", "content": "ok"}]).ids
    facts = await probe_engine(engine, prompt, stop_token_ids=policy.stop_token_ids, version=0, tolerance=tolerance)
    ids = np.concatenate([prompt, facts.sampled.token_ids])
    learned = exact_logprobs(learner.model, ids)[len(prompt) - 1 :]
    gap = float(np.abs(facts.sampled.logprobs - learned).max())
    if not gap < tolerance:
        raise EngineError(
            f"{facts.engine} reports log-probabilities that differ from those of the learner by up to {gap:.2e}; "
            "it must serve the published weights in the learner's precision"
        )
    return facts
