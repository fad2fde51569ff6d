"""`TorchEngine`: the embedded inference engine. A Hugging Face causal LM on this machine, no server.

    generate() x calls -> waiting -> admission -> running batch, token by token -> futures

Two rules of admission, one loop. Continuous: a call joins between two tokens, as soon as there is room. Lock-step
waves: a wave starts when every open session waits, its rows stand in the order in which sessions were opened, and
nothing joins before all of it is answered. When answers arrive would otherwise decide batch shapes, and with them
float rounding; thus the same calls give the same bits, however slow the environments in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from treadle.core.engine import Completion
from treadle.core.errors import EngineError
from treadle.core.status import ComponentStatus
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.compute import Compute
from treadle.engines.limits import Limits
from treadle.engines.lock_step import everybody_waits
from treadle.engines.stop_strings import Decode
from treadle.engines.torch.batch import Batch, Call, EngineCounters
from treadle.engines.torch.model import CachedModel
from treadle.engines.torch.options import TorchEngineOptions

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A call with the session that made it and the future of its answer."""

    session: str
    call: Call
    future: asyncio.Future[Completion]


class TorchEngine:
    """Decodes concurrent sessions in one batch, with a KV cache kept from turn to turn.

    model: any Hugging Face decoder with full or sliding-window attention; the engine works on its own copy, so that
    publication is a copy of weights and never races the optimizer.
    decode: ids -> text, for stop strings.
    own_thread: compute beside the event loop, so that environments keep stepping; otherwise inline (`Compute`).
    Raises ConfigError for other layers, and with `options.routing` for experts whose choice cannot be observed.

    Invariant: a call starts from cached keys and values of the current weights only, of a prefix of what it sends,
    computed for the same session and salt, or for calls of the same salt that were admitted together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: TorchEngineOptions,
        *,
        decode: Decode | None = None,
        own_thread: bool = True,
    ) -> None:
        dtype = model.dtype if options.dtype is None else getattr(torch, options.dtype)
        self._model = CachedModel(model, dtype, options.prefill_tokens, options.routing)
        self.limits = Limits(self._model.vocabulary, self._model.context)
        self._batch = Batch(
            self._model,
            stop_token_ids=options.stop_token_ids,
            decode=decode,
            max_batch=options.max_batch,
            cache_bytes=int(options.cache_gib * 2**30),
        )
        self._can_decode = decode is not None
        self._lock_step, self._recompute = options.lock_step, options.in_flight == "recompute"
        self._closed = self._asleep = False
        self._opened = 0
        self._sessions: dict[str, int] = {}  # name -> number, in the order of opening
        self._gone: list[int] = []  # closed sessions that the batch has not forgotten yet
        self._waiting: dict[Call, _Request] = {}  # in order of arrival
        self._admitted: list[Call] = []  # the batch takes them as it has room
        self._running: dict[Call, _Request] = {}
        self._driver: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # held to use the batch, between two tokens (in lock-step: between two waves)
        self._asked = 0  # publications and scoring passes that wait for their turn or have it
        self._pause = False  # calls have come or sessions have closed: do not go on to the next token
        self._computing = Compute("treadle-engine" if own_thread else None)

    @property
    def counters(self) -> EngineCounters:
        """Return the counts of tokens computed or spared so far."""
        return self._batch.counters

    # --- the Engine protocol -------------------------------------------------------------------------------------

    def open_session(self, session: str) -> None:
        """Announce a session; in lock-step no wave starts before it waits or closes."""
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        self._sessions[session] = self._opened
        self._opened += 1

    def close_session(self, session: str) -> None:
        """Forget a session and its cache; a wave may be waiting for this. Its calls that wait fail, others finish."""
        if session not in self._sessions:
            return
        self._gone.append(self._sessions.pop(session))
        self._fail_waiting(f"session {session!r} was closed while its call waited", session)
        self._start()

    async def generate(
        self, prompt_ids: Ids, sampling: SamplingParams, *, session: str, cache_salt: str | None = None
    ) -> Completion:
        """Sample one completion; cancelling the call frees its row at the next token.

        A session may make several calls at once; in lock-step it waits as soon as one of them does.
        Raises EngineError: unknown session, ids outside the vocabulary, a prompt that leaves no room for `max_tokens`
        in the model's context, or a failure of the batch.
        """
        self._check(prompt_ids, sampling, session)
        call = Call(self._sessions[session], np.array(prompt_ids, np.int32), sampling, cache_salt)
        request = _Request(session, call, asyncio.get_running_loop().create_future())
        self._waiting[call] = request
        self._start()
        try:
            return await request.future
        finally:
            call.cancelled = True  # of no effect on a call that was answered
            self._waiting.pop(call, None)

    async def score(self, ids: Ids, *, temperature: float = 1.0) -> Floats:
        """Return the log-probability of ids[1:] in one pass without cache: int32[T] -> float32[T - 1].

        Raises EngineError: ids outside the vocabulary, more than the model's context, or temperature 0.
        """
        self._check_awake()
        self.limits.check_ids(ids, "ids to score")
        if len(ids) > self.limits.context:
            raise EngineError(f"{len(ids)} tokens exceed the model's context of {self.limits.context}")
        if not temperature > 0:
            raise EngineError(f"scoring needs a temperature above 0, got {temperature}")
        return await self._between_tokens(self._model.score, np.asarray(ids), temperature)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy `weights` (as `unique_weights` names them) in, between two tokens; drops every cached prefix.

        Calls in flight go on with the new weights. Raises EngineError, and changes nothing, where weights are missing
        or of another shape.
        """
        self._check_open()
        await self._between_tokens(self._batch.publish, weights, version, recompute=self._recompute)
        self._asleep = False

    async def sleep(self) -> None:
        """Give back the memory of cache and weights; `update_weights` wakes the engine. Sessions stay open.

        Raises EngineError while calls run, and so do calls while it sleeps. Idempotent.
        """
        self._check_open()
        await self._between_tokens(self._batch.sleep)
        self._asleep = True

    def status(self) -> list[ComponentStatus]:
        """Return what it does now."""
        admitted = len(self._admitted)
        return [
            ComponentStatus(
                "engine",
                "torch",
                running=max(0, len(self._running) - admitted),
                waiting=len(self._waiting) + admitted,
                sessions=len(self._sessions),
                cache=self._batch.cache_share,
                version=self._batch.version,
            )
        ]

    async def close(self) -> None:
        """Stop the worker thread and free the cache; calls that wait or run fail."""
        self._closed = True
        self._fail_waiting("the engine was closed")
        for call in self._running:
            call.cancelled = True
        if self._driver is not None:
            await asyncio.wait([self._driver])
        async with self._turn:  # what holds it ends first; what waits for it is refused
            self._computing.close()
            self._batch.clear()

    # --- requests ------------------------------------------------------------------------------------------------

    def _check(self, prompt: Ids, sampling: SamplingParams, session: str) -> None:
        self._check_awake()
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        self.limits.check_call(prompt, sampling, session)
        if sampling.stop and not self._can_decode:
            raise EngineError(f"stop strings {sampling.stop} need an engine that was given `decode`")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")

    def _check_awake(self) -> None:
        self._check_open()
        if self._asleep:
            raise EngineError("the engine sleeps, without weights; publish some to wake it")

    def _fail_waiting(self, reason: str, session: str | None = None) -> None:
        for request in [r for r in self._waiting.values() if session in (None, r.session)]:
            del self._waiting[request.call]
            _fail(request, EngineError(reason))

    # --- scheduling (event loop) ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the loop if there is something to do; to be called after any change."""
        self._pause = True
        if self._driver is None and self._may_work():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Admit and compute until there is nothing to do."""
        try:
            while await self._work_to_do():
                async with self._turn:
                    self._pause = False
                    self._admit()
                    await self._advance()
        except BaseException:  # Ctrl-C, or the event loop is being torn down: nobody takes what is computed now
            for call, request in self._running.items():
                call.cancelled = True
                _fail(request, EngineError("the engine was interrupted"))
            self._running.clear()
            self._admitted.clear()
            raise
        finally:
            self._driver = None

    async def _work_to_do(self) -> bool:
        await asyncio.sleep(0)  # what was answered or closed in this same tick may change who waits
        return bool(self._running) or self._may_work()

    def _may_work(self) -> bool:
        """Return whether there are calls to admit, or nobody is left for whom the cache would be kept."""
        return self._may_admit() or (bool(self._gone) and not self._sessions)

    def _admit(self) -> None:
        """Hand to the batch what may join now."""
        if not self._may_admit():
            return
        admitted, self._waiting = self._waiting, {}
        self._running |= admitted
        # a stable sort: calls of a session in order of arrival
        self._admitted += sorted(admitted, key=lambda call: call.session) if self._lock_step else admitted

    def _may_admit(self) -> bool:
        """Return whether the waiting calls join: at once, or in lock-step when every open session waits."""
        if not self._lock_step:
            return bool(self._waiting)
        return everybody_waits([request.session for request in self._waiting.values()], self._sessions.keys())

    async def _advance(self) -> None:
        self._drop_cancelled()
        work = asyncio.ensure_future(self._computing.run(self._compute, self._take_gone()))
        await asyncio.wait([work])
        error = _failure(work)
        if error is not None:
            self._batch.clear()
            self._admitted.clear()
            for request in self._running.values():
                _fail(request, error)
            self._running.clear()
            return
        for call, completion in work.result():
            if call not in self._running:  # it was being computed when the engine was interrupted
                continue
            request = self._running.pop(call)
            if self._closed:
                _fail(request, EngineError("the engine was closed"))
            elif not request.future.done():  # cancelled meanwhile
                request.future.set_result(completion)

    def _drop_cancelled(self) -> None:
        """Drop cancelled calls that were admitted, but for which there was no room yet."""
        for call in [call for call in self._admitted if call.cancelled]:
            self._admitted.remove(call)
            _fail(self._running.pop(call), EngineError("the engine was closed"))

    def _take_gone(self) -> list[int]:
        """Take the closed sessions without running calls: what a running call leaves in the cache must go, too."""
        if not self._gone:
            return []
        busy = {call.session for call in self._running}
        gone = [session for session in self._gone if session not in busy]
        self._gone = [session for session in self._gone if session in busy]
        return gone

    async def _between_tokens(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        self._asked += 1
        try:
            async with self._turn:
                self._check_open()
                return await self._computing.run(work, *arguments, **named)
        finally:
            self._asked -= 1

    # --- computing (worker thread) -------------------------------------------------------------------------------

    def _compute(self, gone: Sequence[int]) -> list[tuple[Call, Completion]]:
        """Compute to the end of the wave, or until a call has ended or a request waits; return what has ended."""
        batch = self._batch
        batch.forget(gone)
        while self._admitted or batch.live:
            if not (self._lock_step and batch.live):
                del self._admitted[: batch.join(self._admitted)]
            batch.step()
            if not self._lock_step and (batch.finished or self._pause or self._asked or self._computing.is_inline):
                break
        finished, batch.finished = batch.finished, []
        return finished


def _fail(request: _Request, error: BaseException) -> None:
    if not request.future.done():
        request.future.set_exception(error)


def _failure(work: asyncio.Future[list[tuple[Call, Completion]]]) -> BaseException | None:
    """Return the batch's failure as an EngineError; None without one."""
    if work.cancelled():
        return EngineError("the engine was closed")
    error = work.exception()
    if isinstance(error, Exception) and not isinstance(error, EngineError):
        failure = EngineError(f"the engine failed with {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    return error
