"""Sessions on embedded engines: scripted, random, or running while weights change; what the learner makes of them."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from tests.models import VOCABULARY, full, make_group, step_logprobs, tiny
from tests.sources import make_engine, publish
from tests.until import until
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.engine import Completion, Engine
from treadle.core.types import Group, Ids, SamplingParams, Step
from treadle.engines.torch.engine import TorchEngine
from treadle.models.weights import unique_weights
from treadle.packing.flat import flatten
from treadle.training.config import TrainingConfig
from treadle.training.learner import Learner

PROMPT = np.array([3, 1, 4, 1, 5], np.int32)
STOP = 0  # the stop token
CONTEXT = 1_000_000  # tokens, more than any machine computes in a test


def lasting(seed: int = 0, **fields: Any) -> SamplingParams:
    """Of a call that lasts until its test ends it: an `End` that has come, or a cancellation."""
    return SamplingParams(**{"max_tokens": CONTEXT - 100, "seed": seed, **fields})


class End:
    """Decodes to nothing until `has_come` is set, and to the stop string from then on."""

    STRING = ("the end",)

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, tokens: Sequence[int]) -> str:
        return "the end" if self.has_come else ""


def ids(*values: int) -> Ids:
    return np.array(values, np.int32)


def sampling(seed: int = 0, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "seed": seed, **fields})


@asynccontextmanager
async def serving(
    model: PreTrainedModel | None = None, *, sessions: str = "", lock_step: bool = True, **options: Any
) -> AsyncIterator[TorchEngine]:
    """sessions: one letter for each that is open from the start."""
    engine = make_engine(model or tiny(), lock_step=lock_step, **{"stop_token_ids": [STOP], **options})
    for name in sessions:
        engine.open_session(name)
    try:
        yield engine
    finally:
        await engine.close()


def step_of(prompt: Ids, answer: Completion, params: SamplingParams | None = None) -> Step:
    """The step that a session would record of a call."""
    return Step(
        prompt,
        answer.token_ids,
        answer.logprobs,
        answer.versions_per_token(),
        params or SamplingParams(),
        answer.stop_reason,
        routing=answer.routing,
        support=answer.support,
    )


@dataclass
class Script:
    """What a session does: its first prompt, its sampling, and what it makes of each reply (None: the end)."""

    prompt: Ids
    temperature: float = 1.0
    seed: int = 0
    observations: list[Ids] = field(default_factory=list)  # appended after each reply; then one more call
    cuts: dict[int, int] = field(default_factory=dict)  # before call n, go back to the first so many tokens
    max_tokens: int = 6
    stop: tuple[str, ...] = ()
    filters: dict[str, Any] = field(default_factory=dict)


async def play(engine: Engine, name: str, script: Script) -> list[Step]:
    prompt, steps = script.prompt, list[Step]()
    try:
        for number in range(len(script.observations) + 1):
            seed, length = script.seed * 100 + number, script.max_tokens
            params = SamplingParams(script.temperature, length, script.stop, seed, **script.filters)
            answer = await engine.generate(prompt, params, session=name)
            assert answer.token_ids.dtype == np.int32 and answer.logprobs.dtype == np.float32
            steps.append(step_of(prompt, answer, params))
            if number < len(script.observations):
                prompt = np.concatenate([prompt, answer.token_ids])[: script.cuts.get(number + 1)]
                prompt = np.concatenate([prompt, script.observations[number]])
    finally:
        engine.close_session(name)
    return steps


async def play_all(engine: Engine, scripts: Sequence[Script]) -> list[list[Step]]:
    names = [f"s{number}" for number in range(len(scripts))]
    for name in names:
        engine.open_session(name)
    return list(await asyncio.gather(*[play(engine, n, s) for n, s in zip(names, scripts, strict=True)]))


def recorded(model: PreTrainedModel, scripts: Sequence[Script], **options: Any) -> tuple[list[list[Step]], TorchEngine]:
    async def run() -> tuple[list[list[Step]], TorchEngine]:
        async with serving(model, **options) as engine:
            return await play_all(engine, scripts), engine

    return asyncio.run(run())


def as_groups(played: Sequence[Sequence[Step]]) -> list[Group]:
    return [make_group([(steps, 1.0) for steps in played])]


def random_ids(random: np.random.Generator, low: int, high: int) -> Ids:
    return random.integers(0, VOCABULARY, random.integers(low, high + 1)).astype(np.int32)


def random_script(random: np.random.Generator, prompt: Ids, turns: int, forks: bool) -> Script:
    return Script(
        prompt,
        temperature=float(random.choice([0.4, 0.8, 1.0, 1.6])),
        seed=int(random.integers(1 << 40)),
        observations=[random_ids(random, 1, 5) for _ in range(turns - 1)],
        cuts={n: int(random.integers(1, 12)) for n in range(1, turns) if forks and random.random() < 0.5},
        max_tokens=int(random.integers(1, 9)),
    )


def random_scripts(seed: int, sessions: int = 5, turns: int = 4, forks: bool = True) -> list[Script]:
    """Some share their first prompt, some have their own; they end after different numbers of turns."""
    random = np.random.default_rng(seed)
    shared = random_ids(random, 3, 9)
    return [
        random_script(random, shared if n % 2 else random_ids(random, 1, 14), int(random.integers(1, turns + 1)), forks)
        for n in range(sessions)
    ]


def texts(played: Sequence[Sequence[Step]]) -> list[list[list[int]]]:
    return [[step.completion_ids.tolist() for step in steps] for steps in played]


def logprobs(played: Sequence[Sequence[Step]]) -> Ids:
    return np.concatenate([step.logprobs for steps in played for step in steps])


def learner_gap(model: PreTrainedModel, played: Sequence[Sequence[Step]]) -> float:
    """The largest difference between what an engine reported and what the learner computes, in nats."""
    batch = flatten(as_groups(played))
    assert len(batch) > 0
    learner = Learner(model, TrainingConfig(), AlgorithmConfig(), 1)
    return float(np.abs(batch.logp_rollout - learner.logprobs(batch)).max())


@torch.no_grad()
def plain_gap(model: PreTrainedModel, steps: Iterable[Step]) -> float:
    """The same to a plain forward pass of each step alone, with stock attention."""
    return max(float(np.abs(step.logprobs - full(step_logprobs(model, step)[0])).max()) for step in steps)


# Weights that change while calls run


def moved(model: PreTrainedModel, by: int = 0) -> PreTrainedModel:
    """by: another way for each number."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(100 * by + number)
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def wanted_logprobs(models: Sequence[PreTrainedModel], prompt: Ids, answer: Completion) -> NDArray[Any]:
    """Each token's logprob from the weights of its version, over keys that each older weights left behind."""
    cache = DynamicCache(config=models[0].config)
    versions = answer.versions_per_token()
    feed, logprobs = prompt.astype(np.int64), []
    with torch.no_grad():
        for token, version in zip(answer.token_ids, versions, strict=True):
            # by position: its name changes in transformers 5
            logits = models[version](torch.from_numpy(feed)[None], None, None, cache, use_cache=True).logits[0, -1]
            logprobs.append(float(logits.log_softmax(-1)[token]))
            feed = np.array([token], np.int64)
    return full(torch.tensor(logprobs))


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, prompt: Ids, answer: Completion) -> NDArray[Any]:
    """Each token's logprob as a learner with these weights has it, from one pass over the same ids."""
    return full(step_logprobs(model, step_of(prompt, answer))[0])


async def swapped(
    engine: TorchEngine, end: End, models: Sequence[PreTrainedModel], prompts: Sequence[Ids]
) -> list[Completion]:
    """Calls during which all weights are published one after another."""
    for number in range(len(prompts)):
        engine.open_session(f"s{number}")
    calls = [
        asyncio.create_task(engine.generate(prompt, lasting(number, stop=End.STRING), session=f"s{number}"))
        for number, prompt in enumerate(prompts)
    ]
    for version, model in enumerate(models):
        if version:
            await publish(engine, unique_weights(model), version)
        before = engine.counters.sampled
        await until(lambda: engine.counters.sampled >= before + 10 * len(prompts))  # noqa: B023
    end.has_come = True
    return list(await asyncio.gather(*calls))
