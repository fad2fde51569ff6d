"""`TorchEngine`: the embedded inference engine. A Hugging Face causal LM on this machine, no server.

    generate() x sessions -> wave (all open sessions wait) -> prefill what is new -> decode together -> futures

Lock-step waves: a wave starts when every open session waits for a completion, and its rows stand in the order in
which sessions were opened. When answers arrive would otherwise decide batch shapes, and with them float rounding.
Thus the same calls give the same bits, however slow the environments in between.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from treadle.core.engine import Completion, VersionSpan
from treadle.core.errors import EngineError
from treadle.core.prefix import common_prefix
from treadle.core.types import Floats, Ids, SamplingParams, StopReason
from treadle.engines.kv_cache import ATTENTION, KVCache, KVCall
from treadle.engines.sampling import sample
from treadle.engines.weights import require_plain_attention, unique_weights

P = ParamSpec("P")
T = TypeVar("T")
_SHARED = 0.75  # share of live rows from which computing all rows is cheaper than gathering the live ones


@dataclass(slots=True)
class _Session:
    """order: of opening. busy: a call is in flight.

    row, ids: the cache row that holds keys and values of these tokens, as long as the cache is of that generation.
    """

    order: int
    busy: bool = False
    generation: int = -1
    row: int = 0
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(slots=True)
class _Request:
    session: str
    prompt: Ids
    sampling: SamplingParams
    future: asyncio.Future[Completion]


@dataclass(slots=True)
class EngineCounters:
    """Tokens the model computed or was spared, since the start."""

    prefilled: int = 0  # prompt tokens computed
    reused: int = 0  # prompt tokens found in the session's own cache
    shared: int = 0  # prompt tokens computed once for several sessions
    sampled: int = 0


class TorchEngine:
    """Batched decoding over concurrent sessions with a KV cache kept from turn to turn.

    model: any Hugging Face decoder with full or sliding-window attention; the engine works on its own copy, so that
    publication is a copy of weights and never races the optimizer.
    stop_token_ids: tokens that end a completion (they are part of it). decode: ids -> text, for stop strings.
    max_batch: most rows decoded together. prefill_tokens: most (padded) tokens of one prefill pass.
    own_thread: compute beside the event loop, so that environments keep stepping. Without, waves run on the loop's
    thread: right where nothing else has anything to do meanwhile, as in synchronous training, because OpenMP keeps a
    team of workers per calling thread, and several teams on a small machine slow each other down (1.5 times here).

    Invariant: cached keys and values always belong to the current weights and to a prefix of what the session sends.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_token_ids: Sequence[int],
        decode: Callable[[Sequence[int]], str] | None = None,
        max_batch: int = 256,
        prefill_tokens: int = 16384,
        dtype: torch.dtype | None = None,
        own_thread: bool = True,
    ) -> None:
        self._model = _copy_in(dtype or model.dtype, model).requires_grad_(False).eval()
        self._model.set_attn_implementation(ATTENTION)
        require_plain_attention(self._model)
        self._stop = np.array(sorted(stop_token_ids), np.int64)
        self._decode = decode
        self._max_batch, self._prefill_tokens = max_batch, prefill_tokens
        self._device = self._model.device
        self._vocabulary = int(self._model.config.get_text_config().vocab_size)
        self._context = int(self._model.config.get_text_config().max_position_embeddings)
        self._version = 0
        self._cache = KVCache(rows=0, capacity=0)
        self._generation = 0  # of the cache: another one from the start of each wave and with each publication
        self._closed = False
        self._sessions: dict[str, _Session] = {}
        self._opened = 0
        self._waiting: dict[str, _Request] = {}
        self._wave: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treadle-engine") if own_thread else None
        self.counters = EngineCounters()

    # --- the Engine protocol -------------------------------------------------------------------------------------

    def open_session(self, session: str) -> None:
        """Announce a session; no wave starts before it waits or closes."""
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        self._sessions[session] = _Session(order=self._opened)
        self._opened += 1

    def close_session(self, session: str) -> None:
        """Forget a session and its cache; the others may be waiting for this. A call that still waits fails."""
        self._sessions.pop(session, None)
        self._fail_waiting([session], f"session {session!r} was closed while its call waited")
        self._start_wave()

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        """Sample one completion; returns when its wave is done.

        Raises EngineError: unknown session, a second call of the same session at once, ids outside the vocabulary, a
        prompt that leaves no room for `max_tokens` in the model's context, or whatever its wave failed of.
        """
        self._check(prompt_ids, sampling, session)
        request = _Request(
            session, np.asarray(prompt_ids, np.int32), sampling, asyncio.get_running_loop().create_future()
        )
        caller = self._sessions[session]
        caller.busy = True
        self._waiting[session] = request
        self._start_wave()
        try:
            return await request.future
        finally:
            caller.busy = False
            if self._waiting.get(session) is request:  # cancelled before its wave began
                del self._waiting[session]

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        """Log-probability of ids[1:] in one pass without cache: int32[T] -> float32[T - 1].

        Raises EngineError: ids outside the vocabulary, more than the model's context, or temperature 0.
        """
        self._check_open()
        self._check_ids(ids, "ids to score")
        if len(ids) > self._context:
            raise EngineError(f"{len(ids)} tokens exceed the model's context of {self._context}")
        if not temperature > 0:
            raise EngineError(f"scoring needs a temperature above 0, got {temperature}")
        return await self._computed(self._score, np.asarray(ids), temperature)

    async def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy `weights` (as `unique_weights` names them) in, between waves; drops every cached prefix.

        Raises EngineError, and changes nothing, where weights are missing or of another shape.
        """
        self._check_open()
        await self._computed(self._publish, weights, version)

    async def close(self) -> None:
        """Stop the worker thread and free the cache; calls that wait fail."""
        self._closed = True
        self._fail_waiting(list(self._waiting), "the engine was closed")
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._cache = KVCache(rows=0, capacity=0)

    # --- scheduling (event loop) ---------------------------------------------------------------------------------

    def _check(self, prompt: Ids, sampling: SamplingParams, session: str) -> None:
        self._check_open()
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        if self._sessions[session].busy:
            raise EngineError(f"session {session!r} has a call in flight; one session makes one call at a time")
        self._check_ids(prompt, f"prompt ids of session {session!r}")
        if len(prompt) + sampling.max_tokens > self._context:
            raise EngineError(
                f"prompt of {len(prompt)} + max_tokens {sampling.max_tokens} exceeds the model's context "
                f"of {self._context}"
            )
        if sampling.stop and self._decode is None:
            raise EngineError(f"stop strings {sampling.stop} need an engine that was given `decode`")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")

    def _check_ids(self, ids: Ids, what: str) -> None:
        if not len(ids) or ids.min() < 0 or ids.max() >= self._vocabulary:
            raise EngineError(f"{what} must be non-empty and in [0, {self._vocabulary})")

    def _fail_waiting(self, sessions: Sequence[str], reason: str) -> None:
        for session in sessions:
            request = self._waiting.pop(session, None)
            if request is not None and not request.future.done():
                request.future.set_exception(EngineError(reason))

    def _start_wave(self) -> None:
        if self._wave is None and self._everybody_waits():
            self._wave = asyncio.get_running_loop().create_task(self._run_wave())

    def _everybody_waits(self) -> bool:
        return bool(self._waiting) and self._waiting.keys() == self._sessions.keys()

    async def _run_wave(self) -> None:
        await asyncio.sleep(0)  # a session closed in this same tick may have changed who waits
        if not self._everybody_waits():
            self._wave = None
            return
        requests = sorted(self._waiting.values(), key=lambda r: self._sessions[r.session].order)
        self._waiting.clear()
        sessions = [self._sessions[r.session] for r in requests]
        work = asyncio.ensure_future(self._computed(self._compute, requests, sessions))
        await asyncio.wait([work])
        error = _failure(work)
        for number, request in enumerate(requests):
            if request.future.done():  # cancelled meanwhile
                continue
            if error is None:
                request.future.set_result(work.result()[number])
            else:
                request.future.set_exception(error)
        self._wave = None
        self._start_wave()

    async def _computed(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        if self._thread is None:
            return work(*arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments, **named))

    # --- computing (worker thread) -------------------------------------------------------------------------------

    @torch.inference_mode()
    def _compute(self, requests: list[_Request], sessions: list[_Session]) -> list[Completion]:
        logits = self._prefill(requests, sessions)
        answers: list[Completion] = []
        for start in range(0, len(requests), self._max_batch):
            rows = slice(start, min(start + self._max_batch, len(requests)))
            answers += _Decoding(self, requests[rows], logits[rows], start).run()
        for row, (request, session, answer) in enumerate(zip(requests, sessions, answers, strict=True)):
            session.generation, session.row = self._generation, row
            session.ids = np.concatenate([request.prompt, answer.token_ids])[:-1]  # the last one has no keys yet
        self.counters.sampled += sum(len(a.token_ids) for a in answers)
        return answers

    def _prefill(self, requests: list[_Request], sessions: list[_Session]) -> Tensor:
        """Bring every prompt into the cache, row i for request i; returns the next-token logits float32[B, V]."""
        held = [s.generation == self._generation for s in sessions]
        reuse = [
            min(common_prefix(s.ids, r.prompt), len(r.prompt) - 1) if mine else 0
            for r, s, mine in zip(requests, sessions, held, strict=True)
        ]
        self._generation += 1  # rows change hands now: if this wave fails, nobody reads what it leaves behind
        need = max(len(r.prompt) + r.sampling.max_tokens for r in requests) + 1  # one spare position for padding
        self._cache.arrange([s.row if mine else 0 for s, mine in zip(sessions, held, strict=True)], need)
        logits = torch.empty(len(requests), self._vocabulary, device=self._device)
        fresh: dict[bytes, list[int]] = {}
        for row, request in enumerate(requests):
            if not reuse[row]:
                fresh.setdefault(request.prompt.tobytes(), []).append(row)
        for part in self._parts(list(fresh.values()), lambda rows: len(requests[rows[0]].prompt)):
            self._prefill_fresh([requests[rows[0]].prompt for rows in part], part, logits)
        continued = [row for row, kept in enumerate(reuse) if kept]
        for rows in self._parts(continued, lambda row: len(requests[row].prompt) - reuse[row]):
            chunks = [requests[row].prompt[reuse[row] :] for row in rows]
            index = torch.tensor(rows, device=self._device)
            logits[index] = self._extend(self._cache, _as_slice(rows, index), chunks, [reuse[row] for row in rows])
        self.counters.reused += sum(reuse)
        self.counters.prefilled += sum(len(r.prompt) - k for r, k in zip(requests, reuse, strict=True) if k)
        return logits

    def _prefill_fresh(self, prompts: list[Ids], members: list[list[int]], logits: Tensor) -> None:
        """Compute each distinct prompt once and hand its cache and logits to every row that sent it."""
        longest = max(map(len, prompts))
        once = KVCache(len(prompts), longest + 1)
        answers = self._extend(once, slice(0, len(prompts)), prompts, [0] * len(prompts))
        rows = torch.tensor([row for group in members for row in group], device=self._device)
        sources = torch.tensor([i for i, group in enumerate(members) for _ in group], device=self._device)
        self._cache.copy_rows(once, sources, rows, longest)
        logits[rows] = answers[sources]
        self.counters.prefilled += sum(map(len, prompts))
        self.counters.shared += sum(len(p) * (len(m) - 1) for p, m in zip(prompts, members, strict=True))

    def _extend(self, cache: KVCache, rows: slice | Tensor, chunks: list[Ids], starts: list[int]) -> Tensor:
        """Append chunks[i] at position starts[i] of each row; returns the logits after each chunk, float32[B, V].

        Chunks are padded on the left, so that every row's last token stands in the last column; padding is written to
        the cache's last position, which no real query looks at.
        """
        width = max(map(len, chunks))
        ids = np.zeros((len(chunks), width), np.int64)
        positions = np.full((len(chunks), width), cache.capacity - 1, np.int64)
        for row, (chunk, start) in enumerate(zip(chunks, starts, strict=True)):
            ids[row, width - len(chunk) :] = chunk
            positions[row, width - len(chunk) :] = np.arange(start, start + len(chunk))
        length = max(start + len(chunk) for chunk, start in zip(chunks, starts, strict=True))
        return self._forward(cache, rows, torch.from_numpy(ids), torch.from_numpy(positions), length)

    def _forward(self, cache: KVCache, rows: slice | Tensor, ids: Tensor, positions: Tensor, length: int) -> Tensor:
        """ids, positions int64[B, C] -> logits after the last column, float32[B, V]."""
        positions = positions.to(self._device)
        call = KVCall(cache, rows, positions, length)
        ids = ids.to(self._device)
        logits: Tensor = self._model(
            input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1, kv=call
        ).logits
        return logits[:, -1].float()

    def _parts(self, items: list[T], tokens: Callable[[T], int]) -> list[list[T]]:
        """Cut items into consecutive parts whose padded size stays within `prefill_tokens`."""
        parts: list[list[T]] = []
        width = 0
        for item in items:
            wider = max(width, tokens(item))
            if parts and wider * (len(parts[-1]) + 1) <= self._prefill_tokens:
                parts[-1].append(item)
                width = wider
            else:
                parts.append([item])
                width = tokens(item)
        return parts

    @torch.inference_mode()
    def _score(self, ids: Ids, temperature: float) -> Floats:
        tokens = torch.from_numpy(ids.astype(np.int64))[None].to(self._device)
        positions = torch.arange(len(ids), device=self._device)[None]
        call = KVCall(KVCache(1, len(ids)), slice(0, 1), positions, len(ids))
        logits = self._model(input_ids=tokens, position_ids=positions, use_cache=False, kv=call).logits[0, :-1].float()
        logprobs = (logits / temperature).log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        return np.asarray(logprobs.cpu().numpy(), np.float32)

    @torch.no_grad()
    def _publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        mine = unique_weights(self._model)
        unfit = sorted(name for name, t in mine.items() if name not in weights or weights[name].shape != t.shape)
        if unfit:
            raise EngineError(
                f"publication of version {version} lacks {unfit[:3]} in the engine's shapes ({len(unfit)} weights)"
            )
        for name, tensor in mine.items():
            tensor.copy_(weights[name])
        self._version = version
        self._cache = KVCache(rows=0, capacity=0)
        self._generation += 1


class _Decoding:
    """Decodes some rows of the cache together until each has stopped."""

    def __init__(self, engine: TorchEngine, requests: list[_Request], logits: Tensor, first_row: int) -> None:
        self.engine, self.requests, self.logits, self.first_row = engine, requests, logits, first_row
        size, longest = len(requests), max(r.sampling.max_tokens for r in requests)
        self.temperature = torch.tensor([r.sampling.temperature for r in requests], device=logits.device)
        self.seeds: NDArray[np.uint64] = np.array([r.sampling.seed for r in requests], np.uint64)
        self.limit = np.array([r.sampling.max_tokens for r in requests])
        self.position = np.array([len(r.prompt) for r in requests])
        self.ids = np.zeros((size, longest), np.int32)
        self.logprobs = np.zeros((size, longest), np.float32)
        self.length = np.zeros(size, np.int64)
        self.stopped = np.zeros(size, bool)

    def run(self) -> list[Completion]:
        """Completions in row order."""
        live = computed = np.arange(len(self.requests))  # rows still sampling; rows that `logits` belongs to
        logits = self.logits
        for token in range(self.ids.shape[1]):
            drawn, logprobs = sample(logits, self.temperature[computed], self.seeds[computed], token)
            keep = np.isin(computed, live, assume_unique=True)
            self.ids[live, token] = drawn.cpu().numpy()[keep]
            self.logprobs[live, token] = logprobs.cpu().numpy()[keep]
            self.length[live] += 1
            self.stopped[live] = np.isin(self.ids[live, token], self.engine._stop) | self._hit_stop_string(live)
            live = live[~self.stopped[live] & (self.length[live] < self.limit[live])]
            if not len(live):
                break
            computed = np.arange(len(self.requests)) if len(live) >= _SHARED * len(self.requests) else live
            logits = self._next_logits(computed, live)
        return [self._completion(row) for row in range(len(self.requests))]

    def _next_logits(self, computed: NDArray[np.int64], live: NDArray[np.int64]) -> Tensor:
        """Feed each computed row its last token. A row that is not live writes behind its end, where nobody looks."""
        last = self.ids[computed, self.length[computed] - 1].astype(np.int64)
        offset = np.where(np.isin(computed, live), self.length[computed] - 1, self.length[computed])
        positions = np.minimum(self.position[computed] + offset, self.engine._cache.capacity - 1)
        everything = len(computed) == len(self.requests)
        rows: slice | Tensor = slice(self.first_row, self.first_row + len(computed))
        if not everything:
            rows = torch.from_numpy(computed + self.first_row).to(self.logits.device)
        ids, at = torch.from_numpy(last)[:, None], torch.from_numpy(positions)[:, None]
        return self.engine._forward(self.engine._cache, rows, ids, at, int(positions.max()) + 1)

    def _hit_stop_string(self, live: NDArray[np.int64]) -> NDArray[np.bool_]:
        hit = np.zeros(len(live), bool)
        for number, row in enumerate(live):
            stop = self.requests[row].sampling.stop
            if stop and self.engine._decode is not None:
                text = self.engine._decode(self.ids[row, : self.length[row]].tolist())
                hit[number] = any(s in text for s in stop)
        return hit

    def _completion(self, row: int) -> Completion:
        length = int(self.length[row])
        return Completion(
            token_ids=self.ids[row, :length].copy(),
            logprobs=np.minimum(self.logprobs[row, :length], 0.0),
            stop_reason=StopReason.STOP if self.stopped[row] else StopReason.LENGTH,
            policy_versions=(VersionSpan(self.engine._version, 0, length),),
        )


def _copy_in(dtype: torch.dtype, model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose weights are of that type. Buffers stay: rounded rotary frequencies would misplace late tokens."""
    own = copy.deepcopy(model)
    for parameter in own.parameters():
        parameter.data = parameter.data.to(dtype)
    return own


def _failure(work: asyncio.Future[list[Completion]]) -> BaseException | None:
    """What a wave failed of, as an EngineError."""
    if work.cancelled():
        return EngineError("the engine was closed")
    error = work.exception()
    if isinstance(error, Exception) and not isinstance(error, EngineError):
        failure = EngineError(f"the engine failed with {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    return error


def _as_slice(rows: list[int], index: Tensor) -> slice | Tensor:
    """A slice where rows are consecutive (no copy), else the index."""
    consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
    return slice(rows[0], rows[0] + len(rows)) if consecutive else index
