"""`Samplers`: a `TorchEngine` per version of weights, all over the tensors of one base.

Version (never changes) --first call--> engine, kept while in use, and while among the last few used
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from treadle.core.draws import Stream, call_seed
from treadle.core.engine import Completion
from treadle.core.errors import DataError, EngineError
from treadle.core.types import Floats, Ids, SamplingParams, StopReason
from treadle.engines.torch.batch import Decode
from treadle.engines.torch.engine import TorchEngine
from treadle.engines.torch.options import TorchEngineOptions
from treadle.packing.flat import PackedCall
from treadle.packing.layout import Packing, Sharing
from treadle.tinker.data import PromptScores, Sampled, Samples, Sampling, TopTokens
from treadle.training.forward import Forward
from treadle.training.lm_head import MostProbable

_SESSION = "all"
MISSING = -99999.0
"""Log-probability of a token that the protocol writes where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """Weights to sample by: a model of its own with an adapter that never changes, over the shared base."""

    name: str
    model: PreTrainedModel = field(repr=False)
    lock: Lock = field(default_factory=Lock, repr=False)  # held to compute with the model, or to copy it


@dataclass(slots=True, eq=False)
class _Served:
    """The engine of a version. users: calls in progress. forward: scores other tokens than a prompt's, once asked."""

    version: Version
    engine: TorchEngine
    users: int = 0
    forward: Forward | None = None

    def top(self, ids: Ids, top: MostProbable | torch.Tensor, budget: int) -> tuple[Ids, Floats]:
        """Return tokens and their log-probabilities at each position but the first: int32, float32[T - 1, k]."""
        k = top.count if isinstance(top, MostProbable) else top.shape[1]
        if len(ids) < 2 or not k:
            return np.zeros((len(ids) - 1, k), np.int32), np.zeros((len(ids) - 1, k), np.float32)
        with self.version.lock:
            self.forward = self.forward or Forward(self.version.model, budget)
            [tree] = self.forward.trees([PackedCall(ids, 1, 0)], Packing.STEP, Sharing.TRAJECTORY)
            scores = self.forward.scores(tree, torch.ones(len(ids) - 1), top=top)
        assert scores.top is not None and scores.top_ids is not None
        order = np.argsort(scores.flat)
        return scores.top_ids.cpu().numpy().astype(np.int32)[order], scores.top.float().cpu().numpy()[order]


class Samplers:
    """Samples and scores by any version. kept: how many engines stay while unused; they share the options' cache."""

    def __init__(self, options: TorchEngineOptions, decode: Decode | None, kept: int, budget: int) -> None:
        self._options = replace(options, cache_gib=options.cache_gib / (kept + 1))
        self._decode, self._kept, self._budget = decode, kept, budget
        self._served: dict[Version, _Served] = {}  # the least recently used first
        self._making = asyncio.Lock()

    async def sample(
        self, version: Version, prompt: Ids, sampling: Sampling, num_samples: int, scores: PromptScores
    ) -> Samples:
        """Sample completions of a prompt, and compute what is asked of it. See `Models.sample`."""
        async with self._serving(version) as served:
            engine = served.engine
            prompt = np.asarray(prompt, np.int32)
            engine.limits.check_ids(prompt, "prompt ids")
            _check(scores, prompt, engine.limits.vocabulary)
            completions = await self._completions(engine, prompt, sampling, num_samples)
            logprobs = await _own(engine, prompt) if scores.logprobs else None
            top = await self._top(served, prompt, scores.top, engine.limits.vocabulary)
            targets = await self._targets(served, prompt, scores.targets)
            sequences = []
            for completion in completions:
                whole = np.concatenate([prompt, completion.token_ids])
                each = await self._top(served, whole, scores.top_sampled, engine.limits.vocabulary)
                sequences.append(_sampled(completion, each and _tail(each, len(prompt))))
        return Samples(sequences, logprobs, top, targets)

    async def close(self) -> None:
        """Release all engines; calls in progress fail."""
        served, self._served = self._served, {}
        for each in served.values():
            await each.engine.close()

    async def _completions(
        self, engine: TorchEngine, prompt: Ids, sampling: Sampling, num_samples: int
    ) -> Sequence[Completion]:
        """Sample in the engine's one session, so that calls share keys and values of their prefixes."""
        if not num_samples:
            return []
        room = engine.limits.context - len(prompt)
        if room < 1:
            raise EngineError(f"a prompt of {len(prompt)} tokens fills the model's context of {engine.limits.context}")
        stop, ends = _stops(sampling, self._options.stop_token_ids)
        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
            stop=stop,
            top_k=max(sampling.top_k, 0),
            top_p=sampling.top_p,
        )
        seed = sampling.seed & (2**63 - 1)
        each = [replace(params, seed=call_seed(seed, Stream.SERVE, 0, 0, 0, number)) for number in range(num_samples)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(engine.generate(prompt, one, session=_SESSION, stop_token_ids=ends))
                    for one in each
                ]
        except* (EngineError, DataError) as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _top(self, served: _Served, ids: Ids, k: int, vocabulary: int) -> TopTokens | None:
        """Return the k most probable tokens at each position of ids, none at the first one; None for k 0."""
        if not k:
            return None
        chosen, logprobs = await asyncio.to_thread(served.top, ids, MostProbable(k, vocabulary), self._budget)
        first = np.zeros((1, k), np.int32), np.full((1, k), MISSING, np.float32)
        return TopTokens(np.concatenate([first[0], chosen]), np.concatenate([first[1], logprobs]))

    async def _targets(self, served: _Served, ids: Ids, targets: NDArray[np.int64] | None) -> Floats | None:
        if targets is None:
            return None
        wanted = torch.from_numpy(targets.clip(min=0))
        _, logprobs = await asyncio.to_thread(served.top, ids, wanted, self._budget)
        return np.where(targets < 0, np.float32(0), logprobs)

    @asynccontextmanager
    async def _serving(self, version: Version) -> AsyncIterator[_Served]:
        """Yield the version with its engine, which is not closed inside the block."""
        async with self._making:
            served = self._served.pop(version, None)
            if served is None:
                served = _Served(version, await asyncio.to_thread(self._make, version))
            self._served[version] = served
            served.users += 1
        try:
            yield served
        finally:
            served.users -= 1
            await self._close_unused()

    def _make(self, version: Version) -> TorchEngine:
        with version.lock:
            engine = TorchEngine(version.model, self._options, decode=self._decode)
        engine.open_session(_SESSION)
        return engine

    async def _close_unused(self) -> None:
        """Close the least recently used engines until no more than `kept` are unused."""
        unused = [version for version, served in self._served.items() if not served.users]
        for served in [self._served.pop(version) for version in unused[: max(0, len(unused) - self._kept)]]:
            await served.engine.close()


def _stops(sampling: Sampling, ends: Sequence[int]) -> tuple[tuple[str, ...], Collection[int]]:
    """Return the strings and the tokens that end a completion."""
    if sampling.stop is None:
        return (), ends
    stop = (sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop)
    if not stop:
        return (), ()
    strings = tuple(each for each in stop if isinstance(each, str))
    ids = tuple(each for each in stop if isinstance(each, int))
    if len(stop) not in (len(strings), len(ids)):
        raise DataError(f"stop must be strings or token ids, not both: {list(stop)}")
    return strings, (*ends, *ids)


def _check(scores: PromptScores, prompt: Ids, vocabulary: int) -> None:
    if not (0 <= scores.top <= vocabulary and 0 <= scores.top_sampled <= vocabulary):
        raise DataError(
            f"the most probable {max(scores.top, scores.top_sampled)} tokens of {vocabulary} were requested"
        )
    targets = scores.targets
    if targets is None:
        return
    if targets.ndim != 2 or len(targets) != len(prompt) - 1:
        raise DataError(f"targets of a prompt of {len(prompt)} tokens have the shape {targets.shape}")
    if targets.size and not -1 <= targets.min() <= targets.max() < vocabulary:
        raise DataError(f"targets of a prompt must be in [-1, {vocabulary})")


async def _own(engine: TorchEngine, prompt: Ids) -> Floats:
    return np.append(np.float32(np.nan), await engine.score(prompt)).astype(np.float32)


def _tail(top: TopTokens, start: int) -> TopTokens:
    return TopTokens(top.ids[start:], top.logprobs[start:])


def _sampled(completion: Completion, top: TopTokens | None) -> Sampled:
    ended = "length" if completion.stop_reason is StopReason.LENGTH else "stop"
    return Sampled(completion.token_ids, completion.logprobs, ended, top)  # type: ignore[arg-type]
