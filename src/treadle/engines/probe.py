"""The start-up probe: sample a few tokens, and check everything that training relies on.

An engine's error would be trained on silently; refusing it here costs only seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from treadle.core.engine import Completion, Engine
from treadle.core.errors import EngineError
from treadle.core.types import Ids, SamplingParams, StopReason

_PLAIN = SamplingParams(temperature=1.0, max_tokens=8)
_SEEDS = (1, 2, 3, 4)
_CHANCE = -30.0  # log-probability below which equal samples cannot be a coincidence
_number = count()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of the probe. prompt_ids, sampled: one call at temperature 1, for comparison with a learner.

    gap, tempered_gap: largest difference between reported log-probabilities and the engine's own scoring pass, at
    temperature 1 and 0.7. tokens: total number sampled.
    """

    engine: str
    prompt_ids: Ids
    sampled: Completion
    version: int
    gap: float
    tempered_gap: float
    tokens: int


async def probe_engine(
    engine: Engine,
    prompt_ids: Ids,
    *,
    stop_token_ids: Sequence[int] = (),
    version: int | None = None,
    tolerance: float = 1e-3,
    timeout: float = 120.0,
) -> ProbeResult:
    """Sample a few tokens in a separate session and check the results.

    stop_token_ids: the only tokens after which a completion may report that it stopped; empty: unknown.
    version: expected policy version; None: any. tolerance: largest difference of log-probabilities from the scoring
    pass.
    timeout: limit of the whole probe, in seconds.
    Raises EngineError that names the engine, the problem and the remedy.
    """
    name = type(engine).__name__
    session = f"treadle-probe-{next(_number)}"
    probe = _Probe(engine, name, prompt_ids, session, frozenset(stop_token_ids), version, tolerance)
    engine.open_session(session)
    try:
        async with asyncio.timeout(timeout):
            return await probe.run()
    except TimeoutError as error:
        raise EngineError(
            f"{name} has not answered the probe within {timeout:g} s; see whether it is up and takes calls side by side"
        ) from error
    finally:
        engine.close_session(session)


@dataclass(slots=True)
class _Probe:
    engine: Engine
    name: str
    prompt: Ids
    session: str
    stop: frozenset[int]
    version: int | None
    tolerance: float
    tokens: int = 0

    async def run(self) -> ProbeResult:
        first = await self._ask(replace(_PLAIN, seed=_SEEDS[0]))
        gap = await self._gap(first, _PLAIN.temperature)
        await self._check_seed(first)
        await self._check_side_by_side(first)
        tempered = await self._ask(replace(_PLAIN, temperature=0.7, seed=_SEEDS[0]))
        tempered_gap = await self._gap(tempered, 0.7)
        await self._check_certain()
        version = int(first.versions_per_token()[0])
        return ProbeResult(self.name, self.prompt, first, version, gap, tempered_gap, self.tokens)

    async def _ask(self, sampling: SamplingParams) -> Completion:
        try:
            answer = await self.engine.generate(self.prompt, sampling, session=self.session)
        except EngineError as error:
            raise self._refused(f"failed a call: {error}", f"it must take {sampling}, several at once") from error
        self.tokens += len(answer.token_ids)
        self._check_form(answer, sampling)
        self._check_stop(answer, sampling)
        self._check_versions(answer)
        return answer

    def _refused(self, what: str, fix: str) -> EngineError:
        return EngineError(f"{self.name} {what}; {fix}")

    def _check_form(self, answer: Completion, sampling: SamplingParams) -> None:
        ids, logprobs = answer.token_ids, answer.logprobs
        if ids.ndim != 1 or ids.dtype != np.int32 or (ids < 0).any():
            raise self._refused(
                f"returns token ids of type {ids.dtype} and shape {ids.shape}", "it must return the sampled ids, int32"
            )
        if not 0 < len(ids) <= sampling.max_tokens:
            raise self._refused(
                f"returns {len(ids)} tokens where 1 to {sampling.max_tokens} were asked for", "honour max_tokens"
            )
        if logprobs.shape != ids.shape or logprobs.dtype != np.float32:
            raise self._refused(
                f"returns {len(logprobs)} logprobs of type {logprobs.dtype} for {len(ids)} tokens",
                "it must return one float32 for each sampled token",
            )
        if not np.isfinite(logprobs).all() or (logprobs > 1e-5).any():
            raise self._refused(
                f"returns the logprobs {logprobs.tolist()}", "each must be finite and at most 0: see its precision"
            )

    def _check_stop(self, answer: Completion, sampling: SamplingParams) -> None:
        reason, ids = answer.stop_reason, answer.token_ids
        if reason not in (StopReason.STOP, StopReason.LENGTH):
            raise self._refused(f"ended a call with {str(reason)!r}", "it must be 'stop' or 'length' here")
        if reason is StopReason.LENGTH and len(ids) < sampling.max_tokens:
            raise self._refused(
                f"says 'length' after {len(ids)} of {sampling.max_tokens} tokens",
                "give it a context that holds prompt and max_tokens",
            )
        if reason is StopReason.STOP and self.stop and int(ids[-1]) not in self.stop:
            raise self._refused(
                f"says 'stop' after token {int(ids[-1])}, which is none of {sorted(self.stop)}",
                "set its stop tokens to the tokenizer's and have it return them",
            )
        if early := sorted(self.stop & set(ids[:-1].tolist())):
            raise self._refused(f"sampled on after stop token {early[0]}", "set its stop tokens to the tokenizer's")

    def _check_versions(self, answer: Completion) -> None:
        try:
            versions = set(answer.versions_per_token().tolist())
        except EngineError as error:
            raise self._refused(f"reports impossible versions: {error}", "spans must cover each token once") from error
        if len(versions) > 1 or (self.version is not None and versions != {self.version}):
            wanted = "one version" if self.version is None else f"version {self.version}"
            raise self._refused(
                f"reports versions {sorted(versions)} where {wanted} serves", "its publication did not reach it"
            )

    async def _gap(self, answer: Completion, temperature: float) -> float:
        """Return the largest difference of reported and scored log-probabilities; raise EngineError if it is too large.

        If so, the reported ones do not refer to the sampling distribution.
        """
        whole = np.concatenate([self.prompt, answer.token_ids])
        scores = await self.engine.score(whole, temperature=temperature)
        if scores.shape != (len(whole) - 1,):
            raise self._refused(
                f"scores {len(whole)} tokens with {scores.shape} logprobs", "it must score all but the first"
            )
        gap = float(np.abs(scores[len(self.prompt) - 1 :] - answer.logprobs).max())
        if not gap < self.tolerance:
            raise self._refused(
                f"reports logprobs that differ from its own scoring pass by up to {gap:.2e} "
                f"at temperature {temperature:g}",
                "it must report those of the sampled distribution (vLLM: --logprobs-mode processed_logprobs), "
                "and in float32 if its precision is the cause",
            )
        return gap

    async def _check_seed(self, first: Completion) -> None:
        again = await self._ask(replace(_PLAIN, seed=_SEEDS[0]))
        if again.token_ids.tolist() != first.token_ids.tolist():
            raise self._refused("samples other tokens for the same seed", "it must honour the seed of each call")

    async def _check_side_by_side(self, first: Completion) -> None:
        answers = await asyncio.gather(*[self._ask(replace(_PLAIN, seed=seed)) for seed in _SEEDS])
        for answer in answers:
            await self._gap(answer, _PLAIN.temperature)  # mixed-up answers would not match
        same = all(answer.token_ids.tolist() == first.token_ids.tolist() for answer in answers)
        if same and (len(_SEEDS) - 1) * float(first.logprobs.sum()) < _CHANCE:
            raise self._refused(
                f"samples the same unlikely tokens for {len(_SEEDS)} different seeds",
                "it must honour the seed of each call",
            )

    async def _check_certain(self) -> None:
        """Check deterministic sampling: greedy, and with a filter that leaves one token."""
        greedy = [await self._ask(replace(_PLAIN, temperature=0.0, seed=seed)) for seed in _SEEDS[:2]]
        if greedy[0].token_ids.tolist() != greedy[1].token_ids.tolist():
            raise self._refused("samples other tokens at temperature 0 for another seed", "0 must mean greedy")
        filtered = await self._ask(replace(_PLAIN, top_k=1, seed=_SEEDS[0]))
        if filtered.token_ids.tolist() != greedy[0].token_ids.tolist():
            raise self._refused("samples other tokens with top_k 1 than greedily", "it must honour top_k")
        if float(np.abs(filtered.logprobs).max()) > self.tolerance:
            raise self._refused(
                f"reports logprobs {filtered.logprobs.tolist()} with top_k 1, where each token is certain",
                "they must be of the distribution after filters (vLLM: --logprobs-mode processed_logprobs)",
            )
