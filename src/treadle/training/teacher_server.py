"""`TeacherServer`: a teacher behind a vLLM server, which scores recorded ids as prompts.

steps -distinct, longest-> POST /v1/completions, `prompt_logprobs`, concurrently -> log-probabilities of completions
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from treadle.core.errors import ConfigError, EngineError, TrainingStopped
from treadle.core.types import Step
from treadle.packing.flat import Indices
from treadle.rollout.chat_endpoint import JsonEndpoint
from treadle.rollout.isolation.event_loop import paused_event_loop

T = TypeVar("T")

_SETTING = "algorithm.distillation.teacher"
_TIMEOUT, _PATIENCE = 300.0, 600.0  # seconds: a restarted server may take long to load
_AT_START = 10.0  # limit of its first answer, in seconds
_DECODED = 1024  # ids compared at a time
_IDS = np.dtype(">i4")  # so that bytes sort as ids do
_LARGEST = 2**22  # bytes of an answer without log-probabilities
_PER_TOKEN = 2**9  # maximum mean size of an answer per log-probability with its token, in bytes
_IMPOSSIBLE = -9999.0  # vLLM's value for minus infinity


class ServedScores(NamedTuple):
    """Scores of N tokens: logp float64[N]; top float64[N, k] and top_ids int64[N, k], if requested."""

    logp: NDArray[np.float64]
    top: NDArray[np.float64] | None
    top_ids: Indices | None


class TeacherServer:
    """A vLLM server. context: maximum number of tokens it can score, set by `check`.

    model: its name there; None: the server's only one. api_key_env: environment variable with the key.
    A failing call is retried for ten minutes.
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key_env: str | None = None, concurrency: int = 64
    ) -> None:
        self.url, self.context = url, 0
        self._named: dict[str, Any] = {} if model is None else {"model": model}
        self._key_env, self._concurrency = api_key_env, concurrency

    def check(self, tokenizer: PreTrainedTokenizerBase, longest: int, k: int) -> None:
        """Raise ConfigError if it does not score, if an id decodes to another text, or if its context is too short.

        tokenizer: the policy's. longest: required number of tokens to score. k: as for `scores`.
        """
        try:
            _run(self._check(tokenizer, k))
        except (EngineError, KeyError, TypeError) as error:
            raise ConfigError(f"{_SETTING}: {self.url!r} is not a vLLM server that scores prompts: {error}") from error
        if self.context < longest:
            raise ConfigError(
                f"{_SETTING}: {self.url!r} scores up to {self.context} tokens, and prompt and completion may have "
                f"{longest}; start it with --max-model-len {longest + 1}"
            )

    def scores(self, steps: Sequence[Step | None], sizes: Sequence[int], k: int, vocabulary: int) -> ServedScores:
        """Return scores of the tokens of all steps' completions, in order; NaN for steps that are None.

        sizes: tokens of each step's completion. k: number of most probable tokens to return per state, among ids below
        `vocabulary`; 0: none.
        Raises TrainingStopped if the server refuses a call, or fails for too long.
        """
        try:
            return _run(self._scores(steps, sizes, k, vocabulary))
        except EngineError as error:
            raise TrainingStopped(
                f"{_SETTING}: {self.url!r} did not score the policy's samples: {error}; restart it, and resume"
            ) from error

    async def _check(self, tokenizer: PreTrainedTokenizerBase, k: int) -> None:
        tokenize, detokenize = (self._endpoint(path, _AT_START) for path in ("tokenize", "detokenize"))
        answer = await tokenize.post({**self._named, "prompt": "a"})
        self.context = int(answer["max_model_len"]) - 1  # it samples one token, too
        ids = sorted(tokenizer.get_vocab().values())
        await self._endpoint("v1/completions", _AT_START).post(self._request(ids[:2], k))

        async def differs(part: list[int]) -> bool:
            return bool((await detokenize.post({**self._named, "tokens": part}))["prompt"] != tokenizer.decode(part))

        parts = [ids[start : start + _DECODED] for start in range(0, len(ids), _DECODED)]
        for part, different in zip(parts, await asyncio.gather(*map(differs, parts)), strict=True):
            if not different:
                continue
            # individually, to ignore how texts are joined
            singly = await asyncio.gather(*(differs([ident]) for ident in part))
            for ident, other in zip(part, singly, strict=True):
                if other:
                    raise ConfigError(
                        f"{_SETTING}: token {ident} is {tokenizer.decode([ident])!r} for the trained model, and not "
                        f"for {self.url!r}, which would score other text; use a teacher with the same vocabulary"
                    )

    async def _scores(
        self, steps: Sequence[Step | None], sizes: Sequence[int], k: int, vocabulary: int
    ) -> ServedScores:
        if any(step is not None and step.images for step in steps):
            raise TrainingStopped(
                f"{_SETTING}: {self.url!r} scores ids, and a step has images; give the teacher as a path"
            )
        asked = covering([b"" if step is None else _key(step) for step in steps])
        longest = sorted(set(asked) - {b""})
        most = max(map(len, longest), default=0) // _IDS.itemsize * (2 * k + 9)
        endpoint = self._endpoint("v1/completions", _PATIENCE, most)

        async def score(key: bytes) -> list[tuple[float, list[tuple[int, int, float]]]]:
            """Return each token's log-probability, but the first's, and the k best as (rank, id, log-probability)."""
            ids = np.frombuffer(key, _IDS).tolist()
            # More if some are not the policy's ids.
            for count in (k, 2 * k + 8):
                try:
                    entries = (await endpoint.post(self._request(ids, count)))["choices"][0]["prompt_logprobs"][1:]
                    own = [_logprob(each[str(i)]) for each, i in zip(entries, ids[1:], strict=True)]
                    ranked = [sorted((e["rank"], int(i), _logprob(e)) for i, e in each.items()) for each in entries]
                except (TypeError, KeyError, IndexError, ValueError) as error:
                    raise EngineError(f"its answer has no `prompt_logprobs` of {len(ids)} tokens") from error
                best = [[b for b in each if b[0] <= count and b[1] < vocabulary][:k] for each in ranked]
                if all(len(each) == k for each in best):
                    return list(zip(own, best, strict=True))
            raise EngineError(f"the {count} tokens that it finds most probable are not {k} of the policy's")

        scored = dict(zip(longest, await asyncio.gather(*map(score, longest)), strict=True))
        size = sum(sizes)
        logp, top, top_ids = np.full(size, np.nan), np.full((size, k), np.nan), np.zeros((size, k), np.int64)
        at = 0
        for step, key, count in zip(steps, asked, sizes, strict=True):
            for n in range(0 if step is None else count):
                assert step is not None
                logp[at + n], best = scored[key][len(step.prompt_ids) - 1 + n]
                top_ids[at + n], top[at + n] = [b[1] for b in best], [b[2] for b in best]
            at += count
        logp[logp <= _IMPOSSIBLE] = -np.inf
        return ServedScores(logp, top if k else None, top_ids if k else None)

    def _endpoint(self, path: str, patience: float, logprobs: int = 0) -> JsonEndpoint:
        """Return an endpoint. logprobs: number of log-probabilities an answer may have."""
        url = f"{self.url.rstrip('/').removesuffix('/v1')}/{path}"
        largest = _LARGEST + _PER_TOKEN * logprobs
        return JsonEndpoint(
            url,
            concurrency=self._concurrency,
            timeout=_TIMEOUT,
            patience=patience,
            api_key_env=self._key_env,
            largest=largest,
        )

    def _request(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        return {**self._named, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}


def _logprob(entry: Mapping[str, Any]) -> float:
    """Return the server's log-probability of a token. Raises KeyError, or TypeError for anything but a number."""
    if isinstance(value := entry["logprob"], bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return float(value)


def covering(keys: Sequence[bytes]) -> list[bytes]:
    """Return for each key the longest key it is a prefix of; their scores begin alike."""
    ordered = sorted(set(keys))
    longest = dict[bytes, bytes]()
    for key, after in reversed([*zip(ordered, [*ordered[1:], b""], strict=True)]):
        longest[key] = longest[after] if key and after.startswith(key) else key
    return [longest[key] for key in keys]


def _key(step: Step) -> bytes:
    return step.full_ids.astype(_IDS).tobytes()


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work`; the learner may compute on a thread on which an event loop runs."""
    with paused_event_loop():
        return asyncio.run(work)
