"""`TorchEngine`: the embedded inference engine. A Hugging Face causal LM on this machine, no server.

    generate() x calls -> waiting -> admission -> running batch, token by token -> futures

Two rules of admission, one loop. Continuous: a call joins between two tokens, as soon as there is room. Lock-step: a
wave starts when every open session waits, with rows in the order in which sessions were opened, and nothing joins until
all of it is answered. Batch shapes, and with them float rounding, then do not depend on timing: the same calls give the
same bits, however slow the environments are in between.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Collection, KeysView, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from treadle.core.engine import Completion, ComponentStatus
from treadle.core.errors import DataError, EngineError
from treadle.core.images import PromptImage
from treadle.core.types import Floats, Ids, SamplingParams
from treadle.engines.compute import Compute
from treadle.engines.torch.batch import Batch, Call, Decode, EngineCounters
from treadle.engines.torch.floor import engine_model
from treadle.engines.torch.model import MakeTower
from treadle.engines.torch.options import TorchEngineOptions
from treadle.rendering.grammars import Constraint, Grammars

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Checks calls against a model's limits.

    vocabulary: exclusive bound of ids. context: maximum number of tokens of prompt and completion together. slow: why
    calls are computed one by one; None: they are not. blind: why images are refused; None: they are not.
    """

    vocabulary: int
    context: int
    slow: str | None = None
    blind: str | None = None

    def warn_of_slowness(self) -> None:
        if self.slow is not None:
            # One location, so that several engines of a model warn only once.
            warnings.warn(self.slow, stacklevel=1)

    def check_ids(self, ids: Ids, what: str) -> None:
        if not len(ids) or ids.min() < 0 or ids.max() >= self.vocabulary:
            raise EngineError(f"{what} must be non-empty and in [0, {self.vocabulary})")

    def check_images(self, ids: Ids, images: Sequence[PromptImage], what: str) -> None:
        """Raise EngineError for images that the model is not shown, or that have no place among ids."""
        if images and self.blind is not None:
            raise EngineError(f"{what} show images, and {self.blind}; take a model that sees, or tasks without images")
        try:
            for image in images:
                image.places(ids)
        except DataError as error:
            raise EngineError(f"{what}: {error}") from error

    def check_call(
        self, prompt: Ids, sampling: SamplingParams, session: str, images: Sequence[PromptImage] = ()
    ) -> None:
        """Raise EngineError for a prompt that `check_ids` or `check_images` refuses, or that leaves no room for
        `max_tokens`.
        """
        self.check_ids(prompt, f"prompt ids of session {session!r}")
        self.check_images(prompt, images, f"prompt ids of session {session!r}")
        if len(prompt) + sampling.max_tokens > self.context:
            raise EngineError(
                f"prompt of {len(prompt)} + max_tokens {sampling.max_tokens} exceeds the model's context "
                f"of {self.context}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    session: str
    call: Call
    future: asyncio.Future[Completion]


class TorchEngine:
    """Decodes concurrent sessions in one batch, with a KV cache kept from turn to turn.

    model: any causal LM of Hugging Face. It is copied: publication copies weights, and never races with the optimizer.
    One whose layers cannot use the cache is computed call by call, with a warning (`RowModel`). decode: ids -> text,
    for stop strings. grammars: over the model's tokenizer. own_thread: whether to compute beside the event loop, so
    that environments keep stepping; otherwise inline (`Compute`). vision: makes the tower that shows images to the
    copy. Raises ConfigError with `options.routing` if the choice of experts cannot be observed.

    Invariant: a call reuses only keys and values of the current weights, of a prefix of its prompt, computed for the
    same session and salt, or for calls of the same salt that were admitted together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: TorchEngineOptions,
        *,
        decode: Decode | None = None,
        grammars: Grammars | None = None,
        own_thread: bool = True,
        vision: MakeTower | None = None,
    ) -> None:
        dtype = model.dtype if options.dtype is None else getattr(torch, options.dtype)
        self._model = engine_model(model, dtype, options.prefill_tokens, options.routing, options.device, vision)
        self.limits = Limits(self._model.vocabulary, self._model.context, self._model.slow, self._model.blind)
        self.limits.warn_of_slowness()
        self._options, self._decode, self._grammars = options, decode, grammars
        self._batch = Batch(self._model, options, decode)
        self._lock_step, self._recompute = options.lock_step, options.in_flight == "recompute"
        self._closed = self._asleep = False
        self._opened = 0
        self._sessions: dict[str, int] = {}  # name -> number, in the order of opening
        self._gone: list[int] = []  # closed sessions still cached by the batch
        self._waiting: dict[Call, _Request] = {}  # in order of arrival
        self._admitted: list[Call] = []  # for the batch, as it has room
        self._running: dict[Call, _Request] = {}
        self._driver: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # held to use the batch, between two tokens (in lock-step: between two waves)
        self._asked = 0  # publications and scoring passes that have the turn or wait for it
        self._pause = False  # set when calls arrive or sessions close: return to the event loop before the next token
        self._looked, self._looking = False, asyncio.Lock()  # at the first image
        self._computing = Compute("treadle-engine" if own_thread else None)

    @property
    def counters(self) -> EngineCounters:
        return self._batch.counters

    # --- the Engine protocol -------------------------------------------------------------------------------------

    def open_session(self, session: str) -> None:
        """Open a session; in lock-step no wave starts before it waits or closes."""
        if session in self._sessions:
            raise EngineError(f"session {session!r} is open already")
        self._sessions[session] = self._opened
        self._opened += 1

    def close_session(self, session: str) -> None:
        """Drop a session and its cache. Its waiting calls fail, running ones finish. May start a wave."""
        if session not in self._sessions:
            return
        self._gone.append(self._sessions.pop(session))
        self._fail_waiting(f"session {session!r} was closed while its call waited", session)
        self._start()

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: SamplingParams,
        *,
        session: str,
        cache_salt: str | None = None,
        images: Sequence[PromptImage] = (),
        stop_token_ids: Collection[int] | None = None,
    ) -> Completion:
        """Sample one completion; cancelling the call frees its row at the next token.

        stop_token_ids: that end this one, instead of the options'.
        A session may make several calls at once; in lock-step it waits as soon as one of them does.
        Raises EngineError for an unknown session, ids outside the vocabulary, a prompt that leaves no room for
        `max_tokens` in the model's context, or a failure of the batch; DataError for a grammar that is wrong, or that
        no token of the vocabulary can continue.
        """
        self._check_awake()
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        self.limits.check_call(prompt_ids, sampling, session, images)
        if sampling.stop and self._decode is None:
            raise EngineError(f"stop strings {sampling.stop} need an engine that was given `decode`")
        constraint = self._constraint(sampling)
        if images and not self._looked:
            await self._look(images[0])
        prompt = np.array(prompt_ids, np.int32)
        call = Call(self._sessions[session], prompt, sampling, cache_salt, constraint, images=tuple(images))
        if stop_token_ids is not None:
            call.stop = frozenset(stop_token_ids)
        request = _Request(session, call, asyncio.get_running_loop().create_future())
        self._waiting[call] = request
        self._start()
        try:
            return await request.future
        finally:
            call.cancelled = True  # no effect once it is answered
            self._waiting.pop(call, None)

    async def alone(self, prompt_ids: Ids, sampling: SamplingParams, images: Sequence[PromptImage] = ()) -> Completion:
        """Sample one completion alone, between two tokens (in lock-step: waves), without session or cached prefix.

        Its bits depend only on weights and arguments, and it does not affect other calls' bits, only delays them.
        Raises EngineError as `generate` does.
        """
        self._check_awake()
        self.limits.check_call(prompt_ids, sampling, "alone", images)
        constraint = self._constraint(sampling)
        if isinstance(constraint, DataError):
            raise constraint
        call = Call(0, np.array(prompt_ids, np.int32), sampling, constraint=constraint, images=tuple(images))
        try:
            return await self._between_tokens(self._compute_alone, call)
        finally:
            call.cancelled = True  # no effect once it is answered

    async def score(self, ids: Ids, *, temperature: float = 1.0, images: Sequence[PromptImage] = ()) -> Floats:
        """Return the log-probability of ids[1:] in one pass without cache: int32[T] -> float32[T - 1].

        Raises EngineError for ids outside the vocabulary, more than the model's context, or temperature 0.
        """
        self._check_awake()
        self.limits.check_ids(ids, "ids to score")
        self.limits.check_images(ids, images, "ids to score")
        if len(ids) > self.limits.context:
            raise EngineError(f"{len(ids)} tokens exceed the model's context of {self.limits.context}")
        if not temperature > 0:
            raise EngineError(f"scoring needs a temperature above 0, got {temperature}")
        return await self._between_tokens(self._model.score, np.asarray(ids), temperature, images)

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy in weights, named as by `unique_weights`, between two tokens; drop all cached prefixes.

        Calls in flight continue with the new weights. Raises EngineError, and changes nothing, if weights are missing
        or
        of another shape.
        """
        self._check_open()
        await self._between_tokens(self._batch.publish, weights, version, recompute=self._recompute)
        self._asleep = False

    async def sleep(self) -> None:
        """Free the memory of cache and weights until `update_weights`. Sessions stay open. Idempotent.

        Raises EngineError while calls run. Calls made while asleep raise it, too.
        """
        self._check_open()
        await self._between_tokens(self._batch.sleep)
        self._asleep = True

    def status(self) -> list[ComponentStatus]:
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
        """Stop the worker thread and free the cache; waiting and running calls fail."""
        self._closed = True
        self._fail_waiting("the engine was closed")
        for call in self._running:
            call.cancelled = True
        if self._driver is not None:
            await asyncio.wait([self._driver])
        # Its holder ends first; others waiting for it are refused.
        async with self._turn:
            self._computing.close()
            self._batch.clear()

    # --- requests ------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed")

    def _constraint(self, sampling: SamplingParams) -> Constraint | DataError | None:
        if not sampling.constrains:
            return None
        if self._grammars is None:
            raise EngineError("a grammar and forbidden ids need an engine that was given `grammars`")
        try:
            return self._grammars.constraint(sampling)
        except DataError as error:
            return error

    async def _look(self, image: PromptImage) -> None:
        """Check with the first image that the model sees pixels. Raises EngineError, and for all later ones."""
        async with self._looking:
            if not self._looked:
                try:
                    await self._between_tokens(self._model.check_pixels, image)
                except EngineError as error:
                    self.limits = replace(self.limits, blind=str(error))
                    raise
                self._looked = True

    def _check_awake(self) -> None:
        self._check_open()
        if self._asleep:
            raise EngineError("the engine sleeps, without weights; publish some to wake it")

    def _fail_running(self, error: BaseException) -> None:
        for call, request in self._running.items():
            call.cancelled = True
            _fail(request, error)
        self._running.clear()
        self._admitted.clear()

    def _fail_waiting(self, reason: str, session: str | None = None) -> None:
        for request in [r for r in self._waiting.values() if session in (None, r.session)]:
            del self._waiting[request.call]
            _fail(request, EngineError(reason))

    # --- scheduling (event loop) ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the loop if there is something to do. Call after any change."""
        self._pause = True
        if self._driver is None and self._may_work():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Admit and compute until there is nothing to do."""
        try:
            while True:
                # Lets answers and closings of the same tick take effect.
                await asyncio.sleep(0)
                if not self._running and not self._may_work():
                    return
                async with self._turn:
                    self._pause = False
                    self._admit()
                    await self._advance()
        # Ctrl-C, or the event loop is being torn down: no caller takes the results now.
        except BaseException:
            self._fail_running(EngineError("the engine was interrupted"))
            raise
        finally:
            self._driver = None

    def _may_work(self) -> bool:
        """Return whether there are calls to admit, or a cache to free because no session is open."""
        return self._may_admit() or (bool(self._gone) and not self._sessions)

    def _admit(self) -> None:
        if not self._may_admit():
            return
        admitted, self._waiting = self._waiting, {}
        for call in list(admitted):
            if isinstance(call.constraint, DataError):  # not refused earlier: a wave waits for a call of each session
                _fail(admitted.pop(call), call.constraint)
        self._running |= admitted
        # A stable sort keeps a session's calls in order of arrival.
        self._admitted += sorted(admitted, key=lambda call: call.session) if self._lock_step else admitted

    def _may_admit(self) -> bool:
        """Return whether the waiting calls join: at once, or in lock-step when every open session waits."""
        if not self._lock_step:
            return bool(self._waiting)
        return everybody_waits([request.session for request in self._waiting.values()], self._sessions.keys())

    async def _advance(self) -> None:
        for call in [call for call in self._admitted if call.cancelled]:  # cancelled before there was room
            self._admitted.remove(call)
            _fail(self._running.pop(call), EngineError("the engine was closed"))
        work = asyncio.ensure_future(self._computing.run(self._compute, self._take_gone()))
        await asyncio.wait([work])
        error = _failure(work)
        if error is not None:
            self._batch.clear()
            self._fail_running(error)
            return
        for call, completion in work.result():
            # None: the engine was interrupted while computing it.
            request = self._running.pop(call, None)
            if request is None or request.future.done():  # done if cancelled meanwhile
                continue
            if self._closed:
                _fail(request, EngineError("the engine was closed"))
            elif isinstance(completion, DataError):
                _fail(request, completion)
            else:
                request.future.set_result(completion)

    def _take_gone(self) -> list[int]:
        """Take the closed sessions without running calls, which would leave more in the cache."""
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

    def _compute(self, gone: Sequence[int]) -> list[tuple[Call, Completion | DataError]]:
        """Compute to the end of the wave, or until a call ended or a request waits; return the ended calls."""
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

    def _compute_alone(self, call: Call) -> Completion:
        batch = Batch(self._model, replace(self._options, max_batch=1, cache_gib=0.0), self._decode)
        batch.version = self._batch.version
        batch.join([call])
        while batch.live:
            batch.step()
        completion = batch.finished[0][1]
        if isinstance(completion, DataError):
            raise completion
        return completion


def _fail(request: _Request, error: BaseException) -> None:
    if not request.future.done():
        request.future.set_exception(error)


def _failure(work: asyncio.Future[list[tuple[Call, Completion | DataError]]]) -> BaseException | None:
    """Return the batch's failure as an EngineError; None if it succeeded."""
    if work.cancelled():
        return EngineError("the engine was closed")
    error = work.exception()
    if isinstance(error, Exception) and not isinstance(error, EngineError):
        failure = EngineError(f"the engine failed with {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    return error


def everybody_waits(waiting: Collection[str], sessions: KeysView[str]) -> bool:
    """Return whether every open session, of at least one, waits for a completion.

    waiting: session of each waiting call; a session may have several.
    """
    # Counts first, because building the sets takes time in proportion to their size.
    if not waiting or len(waiting) < len(sessions):
        return False
    return set(waiting) == sessions
