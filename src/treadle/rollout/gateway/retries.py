"""Distinguishes retries from new samples, and manages answers that clients wait for or give up.

A request is a retry only if
- its `Idempotency-Key` was sent before, or
- the SDK marks it (`x-stainless-retry-count` above 0) and the same body arrived before, or
- the same body arrived before and that answer could not be fully delivered.
It then joins the earlier exchange: waits for its answer, or is answered from the record. Anything else is a new sample.

A request that failed here, or that its client gave up (a time limit, a disconnect, the end of its attempt), is noted as
`Exchanges.unanswered` until a retry of it is answered: the attempt's grade might reflect a slow engine.

    asked --sampling--> answered --delivered--> done
       \\ given up: `grace` seconds, then aborted  \\ given up: its steps are dropped until a retry takes them
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from treadle.core.errors import ContextExceeded, DataError, StepsExceeded, TreadleError
from treadle.rollout.gateway.request import Answer, ApiError
from treadle.rollout.session import Reply

_FOR_NOW = (429, 503)
_TURNS = 10  # turns of the event loop for noticing a closed connection; it takes six


class GivenUp(TreadleError, TimeoutError):
    """Raised if a call ended by a client's own time limit, a disconnect, or the end of its attempt, before the answer.

    seconds: time waited for the call.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return f"its client gave it up after {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True, eq=False)
class Unanswered:
    """A client's request without an answer, by the digest of its body and its idempotency key.

    error: error on this side, or GivenUp.
    """

    body: bytes
    key: str | None
    error: BaseException


@dataclass(frozen=True, slots=True)
class Origin:
    """Identifies a request and its retries.

    body: digest of route and body; for an unreadable request, `unread`: its route and length. retry: the SDK's retry
    count.

    """

    body: bytes
    key: str | None = None
    retry: int = 0
    unread: bytes = b""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request with all its retries.

    began: monotonic time, in seconds. waiting: number of connections waiting for the answer. retry: highest retry count
    so far. repeats: the unanswered request that this one retries.
    """

    origin: Origin
    task: asyncio.Task[Answer]
    retry: int
    began: float = field(default_factory=time.monotonic)
    repeats: Unanswered | None = None
    waiting: int = 0
    delivered: bool = False
    abort: asyncio.TimerHandle | None = None

    @property
    def abandoned(self) -> bool:
        """Return whether no client waits for the answer and none got it."""
        return not self.waiting and not self.delivered


class Exchanges:
    """The exchanges of one session.

    set_delivered: called with the number of a step, and whether its answer reached the client. grace: seconds to keep
    sampling after the last client left, so that a retry can join. max_running: number of exchanges sampled
    concurrently. bad_requests: why requests were refused as malformed. unanswered: requests that failed, were too large
    or were given up, without an answered retry.

    Invariant: a step is dropped (as cancelled) exactly while its answer has been given up and never fully delivered.
    A failed or abandoned request counts as answered only by a later one with a delivered answer.
    """

    def __init__(self, set_delivered: Callable[[int, bool], None], grace: float, max_running: int) -> None:
        self._deliver, self._grace, self._max_running = set_delivered, grace, max_running
        self.bad_requests: list[str] = []
        self.unanswered: list[Unanswered] = []
        self._by_body: dict[bytes, list[Exchange]] = {}
        self._by_key: dict[str, Exchange] = {}
        self._void: Counter[bytes] = Counter()  # unanswered requests by body; their retries are new samples
        self._running: set[Exchange] = set()
        self._limit_met = -math.inf  # time of the last limit; inf: no further request is answered

    async def settle(self, origin: Origin) -> None:
        """Call before `find`: notices a client that has just hung up on an identical request."""
        for _ in range(_TURNS):
            same = self._by_body.get(origin.body, [])
            if any(exchange.abandoned for exchange in same) or not any(exchange.waiting for exchange in same):
                return
            await asyncio.sleep(0)

    def find(self, origin: Origin) -> Exchange | None:
        """Return the exchange that this request retries; None for a new sample.

        Among identical requests, a retry joins one that no client waits for or got an answer to, otherwise the newest.
        Raises ApiError for a key reused with another body.
        """
        if origin.key is not None and (exchange := self._by_key.get(origin.key)):
            if exchange.origin.body != origin.body:
                raise ApiError(400, "Idempotency-Key: was sent before with another request", "Idempotency-Key")
            return exchange
        same = self._by_body.get(origin.body, [])
        if origin.key is not None:
            # A different key means a different request.
            same = [e for e in same if e.origin.key is None]
        if abandoned := next((e for e in same if e.abandoned), None):
            return abandoned
        if self._void[origin.body]:
            self._void[origin.body] -= 1
            return None
        return next((e for e in reversed(same) if e.retry < origin.retry), None)

    def start(self, origin: Origin, sample: Callable[[], Coroutine[Any, Any, Answer]]) -> Exchange:
        """Start a new exchange. Raises ApiError (429) if too many are already being sampled."""
        if len(self._running) >= self._max_running:
            self._void[origin.body] += 1
            raise ApiError(
                429, f"this session has {self._max_running} requests in flight already; wait for one of them"
            )
        exchange = Exchange(origin, asyncio.create_task(sample()), origin.retry)
        self._by_body.setdefault(origin.body, []).append(exchange)
        if origin.key is not None:
            self._by_key[origin.key] = exchange
        self._running.add(exchange)
        exchange.task.add_done_callback(lambda task: self._sampled(exchange))
        return exchange

    @asynccontextmanager
    async def waiting(self, exchange: Exchange, origin: Origin) -> AsyncIterator[asyncio.Task[Answer]]:
        """Yield the sampling task while a connection waits for it; the last to leave without `deliver` gives it up."""
        exchange.retry = max(exchange.retry, origin.retry)
        if exchange.abandoned:
            exchange.repeats = self._take_unanswered(origin)
        exchange.waiting += 1
        if exchange.abort is not None:
            exchange.abort.cancel()
            exchange.abort = None
        try:
            yield exchange.task
        finally:
            exchange.waiting -= 1
            if exchange.abandoned:
                self._give_up(exchange)

    def deliver(self, exchange: Exchange) -> None:
        """Record that the whole answer was sent."""
        exchange.delivered, exchange.repeats = True, None
        if self._limit_met < math.inf:
            self._limit_met = -math.inf
        self._set_delivered(exchange, True)

    def refuse(self, error: ApiError, origin: Origin) -> None:
        """Record that a request was refused: as malformed, as too large (413), or temporarily (429, 503)."""
        if error.status == 413:
            self.lose(DataError(error.message), origin)
        elif error.status in _FOR_NOW:
            self.lose(error, origin)
        else:
            self.bad_requests.append(error.message)

    def lose(self, error: BaseException, origin: Origin) -> None:
        """Record that a request, or its retry, got no answer."""
        self._take_unanswered(origin)
        self.unanswered.append(Unanswered(origin.body, origin.key, error))

    async def close(self) -> None:
        """Abort running samples; drop the steps of undelivered answers."""
        for exchange in self._exchanges():
            if exchange.waiting and not exchange.delivered:
                self._note_given_up(exchange)
        running = [exchange.task for exchange in self._running]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for exchange in self._exchanges():
            if exchange.abort is not None:
                exchange.abort.cancel()
            if not exchange.delivered:
                self._set_delivered(exchange, False)

    def _exchanges(self) -> list[Exchange]:
        return [exchange for exchanges in self._by_body.values() for exchange in exchanges]

    def _take_unanswered(self, origin: Origin) -> Unanswered | None:
        """Remove and return the unanswered request that this one retries, if any."""
        failed = self.unanswered
        same = [f for f in failed if not (f.key and origin.key and f.key != origin.key)]
        retried = next((f for body in (origin.body, origin.unread) for f in same if f.body == body), None)
        if retried is not None:
            failed.remove(retried)
        return retried

    def _put_back(self, exchange: Exchange) -> None:
        if exchange.repeats is not None:
            self.unanswered.append(exchange.repeats)
            exchange.repeats = None

    def _sampled(self, exchange: Exchange) -> None:
        self._running.discard(exchange)
        error = None if exchange.task.cancelled() else exchange.task.exception()
        if exchange.task.cancelled() or error is not None:
            self._note_failure(exchange, error)
            # There is no answer to repeat: the next request is a new one.
            self._forget(exchange)
        elif exchange.abandoned:
            self._set_delivered(exchange, False)

    def _note_failure(self, exchange: Exchange, error: BaseException | None) -> None:
        match error:
            case ApiError() if error.status not in _FOR_NOW:
                self.refuse(error, exchange.origin)
            case StepsExceeded():
                # Limits are met by the model's own behavior.
                self._limit_met = math.inf
            case ContextExceeded():
                self._limit_met = max(self._limit_met, time.monotonic())
            case BaseException() if not exchange.abandoned:  # otherwise it is noted as given up
                exchange.repeats = Unanswered(exchange.origin.body, exchange.origin.key, error)
        self._put_back(exchange)

    def _give_up(self, exchange: Exchange) -> None:
        """Handle the last client's departure: sample on for a while, or drop the steps of a finished answer."""
        if not exchange.task.done():
            exchange.abort = asyncio.get_running_loop().call_later(self._grace, self._abort, exchange)
        elif exchange.task.cancelled() or exchange.task.exception() is not None:
            # The client was told that there is none.
            return
        self._note_given_up(exchange)
        self._set_delivered(exchange, False)

    def _note_given_up(self, exchange: Exchange) -> None:
        # Otherwise it gave up because another call met a limit meanwhile.
        if exchange.began > self._limit_met:
            given_up = GivenUp(time.monotonic() - exchange.began)
            exchange.repeats = exchange.repeats or Unanswered(exchange.origin.body, exchange.origin.key, given_up)
        self._put_back(exchange)

    def _abort(self, exchange: Exchange) -> None:
        self._forget(exchange)  # first, so that no retry joins it
        exchange.task.cancel()

    def _set_delivered(self, exchange: Exchange, delivered: bool) -> None:
        if exchange.task.done() and not exchange.task.cancelled() and exchange.task.exception() is None:
            for reply in exchange.task.result().replies:
                if isinstance(reply, Reply):
                    self._deliver(reply.number, delivered)

    def _forget(self, exchange: Exchange) -> None:
        same = self._by_body.get(exchange.origin.body, [])
        if exchange in same:
            same.remove(exchange)
            self._void[exchange.origin.body] += 1
            if exchange.origin.key is not None:
                del self._by_key[exchange.origin.key]
        if not same:
            self._by_body.pop(exchange.origin.body, None)
