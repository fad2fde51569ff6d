"""Multi-turn sampling: engines against Hugging Face `generate`, same model, same work, random observations.

Simplified: every completion has the same length and observations are random ids, so that all do the same work. vLLM is
measured where its environment is installed.

    python -m benchmarks.rollout
    python -m benchmarks.rollout --recipe demo-hybrid
    python -m benchmarks.rollout --threads 2 --repeats 5
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.measure import Row, Table, make_parser, median_seconds, show
from treadle.core.draws import Stream, call_seed
from treadle.core.engine import Engine
from treadle.core.errors import ConfigError
from treadle.core.types import Ids, SamplingParams
from treadle.engines.config import EngineConfig
from treadle.loop.engines import open_serving
from treadle.models.chat import load_chat
from treadle.models.config import ModelConfig
from treadle.plan.config import load_recipe
from treadle.plan.validation import check_engine_config
from treadle.training.make import load_source

_VOCABULARY = 704
_PAD, _STOP = 0, 2
_NAMES = {"torch": "TorchEngine", "vllm": "VLLMEngine"}
_BASE = "transformers generate"
EMBEDDED = EngineConfig(kind="torch", lock_step=False)

RolloutRunner = Callable[["Work"], object]
"""Plays all sessions of some work."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work to do: `sessions` in groups of `group` with a common first prompt.

    Lengths are in tokens, those of the demo. Prompts and observations vary between half and one and a half times as
    many, so that a batch is ragged.
    """

    sessions: int
    group: int = 8
    turns: int = 4
    prompt: int = 40
    completion: int = 8
    observation: int = 20

    def first_prompts(self) -> list[Ids]:
        """Return one prompt per session."""
        rng = np.random.default_rng(0)
        distinct = [_about(rng, self.prompt) for _ in range(-(-self.sessions // self.group))]
        return [distinct[i // self.group] for i in range(self.sessions)]

    def observations(self, turn: int) -> list[Ids]:
        """Return what each session observes after that turn."""
        rng = np.random.default_rng(turn + 1)
        return [_about(rng, self.observation) for _ in range(self.sessions)]


def _about(rng: np.random.Generator, count: int) -> Ids:
    size = rng.integers(count // 2, count + count // 2 + 1)
    return rng.integers(_STOP + 1, _VOCABULARY, size).astype(np.int32)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure seconds and sampled tokens a second, for several numbers of sessions; print a table."""
    parser = make_parser(__doc__, repeats=3, threads=True)
    parser.add_argument("--recipe", default="demo", help="whose model")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    sessions, turns = ((2,), (2,)) if options.small else ((1, 8, 32, 64), (4, 8))
    with asyncio.Runner() as runner:
        rows = _model_rows(runner, load_recipe(options.recipe).model, [EMBEDDED], sessions, turns, options.repeats)
        if _has_vllm() and not options.small and options.recipe == "demo":
            wider = load_recipe("demo", ["model.build.head_dim=32"]).model  # vLLM's kernels for CPUs want 32 or more
            engines = [EMBEDDED, EngineConfig(kind="vllm", batch=64)]
            rows += _model_rows(runner, wider, engines, sessions, turns, options.repeats)
    note = f"the model of {options.recipe}, median of {options.repeats}, {options.threads} thread(s)"
    show(options.json, Table("rollout", note, rows))


def _has_vllm() -> bool:
    try:
        check_engine_config(EngineConfig(kind="vllm"))
    except ConfigError:
        return False
    return True


def _model_rows(
    runner: asyncio.Runner,
    model: ModelConfig,
    configs: Sequence[EngineConfig],
    sessions: Sequence[int],
    turns: Sequence[int],
    repeats: int,
) -> list[Row]:
    """Measure every engine with one model, and `generate`."""
    renderer = load_chat(model, None)[1]
    renderer.stop_ids = ()  # all play to the full length
    source = load_source(model, seed=0)
    players: dict[str, RolloutRunner] = {}
    engines = []
    for config in configs:
        engine = runner.run(open_serving(config, renderer, source))
        engines.append(engine)
        players[_NAMES[config.kind]] = partial(_play, runner, engine, True)
        players[f"{_NAMES[config.kind]}, no reuse"] = partial(_play, runner, engine, False)
    players[_BASE] = partial(_generate, source.module.eval())
    rows: list[Row] = []
    try:
        for count in sessions:
            for number in turns:
                rows += _rows(players, Work(count, group=min(8, count), turns=number), repeats)
    finally:
        for engine in engines:
            runner.run(engine.close())
    parameters = source.model.parameters / 1e6
    return [{"model": f"{parameters:.2f}M", **row} for row in rows]


def _rows(players: Mapping[str, RolloutRunner], work: Work, repeats: int) -> list[Row]:
    runs = {name: partial(play, work) for name, play in players.items()}
    for run in runs.values():
        run()
    taken = median_seconds(runs, repeats, time.perf_counter)
    tokens = work.sessions * work.turns * work.completion
    return [
        {
            "engine": name,
            "sessions": work.sessions,
            "turns": work.turns,
            "sampled tokens": tokens,
            "s": seconds,
            "tokens/s": tokens / seconds,
            "times generate": taken[_BASE] / seconds,
        }
        for name, seconds in taken.items()
    ]


def _play(runner: asyncio.Runner, engine: Engine, reuse: bool, work: Work) -> None:
    runner.run(_sessions(engine, reuse, work))


async def _sessions(engine: Engine, reuse: bool, work: Work) -> None:
    """Play all sessions side by side, each turn as soon as the one before is answered."""

    async def play(name: str, number: int, ids: Ids) -> None:
        engine.open_session(name)
        for turn in range(work.turns):
            sampling = SamplingParams(max_tokens=work.completion, seed=call_seed(0, Stream.BENCH, 0, number, 0, turn))
            salt = None if reuse else str(turn)  # calls of different salts share nothing
            answer = await engine.generate(ids, sampling, session=name, cache_salt=salt)
            ids = np.concatenate([ids, answer.token_ids, observations[turn][number]])
        engine.close_session(name)

    observations = [work.observations(turn) for turn in range(work.turns)]
    await asyncio.gather(*(play(f"{i:04d}", i, ids) for i, ids in enumerate(work.first_prompts())))


def _generate(model: PreTrainedModel, work: Work) -> None:
    """Play one padded batch. Every turn sends the whole history: `generate` keeps no cache for a ragged batch."""
    histories = work.first_prompts()
    for turn in range(work.turns):
        ids, mask = _left_padded(histories)
        answers = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=work.completion,
            min_new_tokens=work.completion,
            pad_token_id=_PAD,
            eos_token_id=_STOP,
        )[:, ids.shape[1] :]
        histories = [
            np.concatenate([history, answer, observation])
            for history, answer, observation in zip(histories, answers.numpy(), work.observations(turn), strict=True)
        ]


def _left_padded(histories: Sequence[Ids]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, int64[B, longest]."""
    longest = max(map(len, histories))
    ids, mask = (np.zeros((len(histories), longest), np.int64) for _ in range(2))
    for row, history in enumerate(histories):
        ids[row, longest - len(history) :] = history
        mask[row, longest - len(history) :] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


if __name__ == "__main__":
    main()
