"""Multi-turn sampling: `TorchEngine` against Hugging Face `generate`, same model, same work, random observations.

Simplified: every completion has the same length and observations are random ids, so that both do the same work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from treadle.cli.benchmarks.report import Report, Row, cpu_seconds
from treadle.core.draws import Stream, call_seed
from treadle.core.types import Ids, SamplingParams
from treadle.engines.torch_engine import TorchEngine
from treadle.orchestration.config import load_recipe
from treadle.training.model import make_model

_VOCABULARY = 704


@dataclass(frozen=True, slots=True)
class Work:
    """sessions in groups of `group` with a common first prompt; lengths in tokens."""

    sessions: int
    group: int = 8
    turns: int = 4
    prompt: int = 40
    completion: int = 8
    observation: int = 20

    def first_prompts(self) -> list[Ids]:
        """One prompt per session."""
        rng = np.random.default_rng(0)
        distinct = [rng.integers(3, _VOCABULARY, self.prompt).astype(np.int32) for _ in range(self.sessions)]
        return [distinct[i // self.group] for i in range(self.sessions)]

    def observations(self, turn: int) -> Ids:
        """int32[sessions, observation]."""
        rng = np.random.default_rng(turn + 1)
        return rng.integers(3, _VOCABULARY, (self.sessions, self.observation)).astype(np.int32)


def measure(threads: int, repeats: int, sessions: Sequence[int] = (1, 8, 32, 64)) -> Report:
    """CPU seconds and sampled tokens per CPU second, for each number of sessions."""
    torch.set_num_threads(threads)
    model = make_model(load_recipe("demo").model, _VOCABULARY, seed=0)
    stock = make_model(load_recipe("demo").model, _VOCABULARY, seed=0).eval()
    rows: list[Row] = []
    for count in sessions:
        work = Work(count, group=min(8, count))
        tokens = count * work.turns * work.completion
        names = ("TorchEngine", "TorchEngine, no reuse", "transformers generate")
        taken = cpu_seconds(
            {
                names[0]: partial(_play, model, work, reuse=True),
                names[1]: partial(_play, model, work, reuse=False),
                names[2]: partial(_generate, stock, work),
            },
            repeats,
        )
        for name in names:
            rows.append(
                {
                    "engine": name,
                    "sessions": count,
                    "sampled tokens": tokens,
                    "CPU s": taken[name],
                    "tokens per CPU s": tokens / taken[name],
                    "times generate": taken[names[2]] / taken[name],
                }
            )
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    note = f"{parameters:.2f}M-parameter Qwen3, {Work(1).turns} turns, median of {repeats}, {threads} thread(s)"
    return Report("rollout", note, rows)


def _play(model: PreTrainedModel, work: Work, reuse: bool) -> None:
    asyncio.run(_engine(model, work, reuse))


async def _engine(model: PreTrainedModel, work: Work, reuse: bool) -> None:
    engine = TorchEngine(model, stop_token_ids=[])
    names = [f"{i:04d}" for i in range(work.sessions)]
    for name in names:
        engine.open_session(name)

    async def play(number: int, ids: Ids) -> None:
        for turn in range(work.turns):
            if turn and not reuse:  # a session that is opened anew has no cache
                engine.close_session(names[number])
                engine.open_session(names[number])
            seed = call_seed(0, Stream.BENCH, 0, number, 0, turn)
            sampling = SamplingParams(temperature=1.0, max_tokens=work.completion, seed=seed)
            answer = await engine.generate(ids, sampling, session=names[number])
            ids = np.concatenate([ids, answer.token_ids, work.observations(turn)[number]])
        engine.close_session(names[number])

    await asyncio.gather(*(play(i, ids) for i, ids in enumerate(work.first_prompts())))
    await engine.close()


def _generate(model: PreTrainedModel, work: Work) -> None:
    """Batched; every turn sends the whole history, as `generate` offers no cache across calls of a ragged batch."""
    ids = torch.from_numpy(np.stack(work.first_prompts())).long()
    for turn in range(work.turns):
        ids = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=work.completion,
            min_new_tokens=work.completion,
            pad_token_id=0,
            eos_token_id=2,
        )
        ids = torch.cat([ids, torch.from_numpy(work.observations(turn)).long()], 1)
