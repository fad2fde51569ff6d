"""Which request is a new sample and which a retry; who waits for an answer, and what becomes of it if nobody does.

A request is a retry only if
- its `Idempotency-Key` was sent before, or
- the SDK says so (`x-stainless-retry-count` above 0) and the same body came before, or
- the same body came before and that answer could not be fully delivered.
It then joins the earlier exchange: waits for its answer, or is answered from the record. Anything else is a new sample.

    asked --sampling--> answered --delivered--> done
       \\ nobody waits: `grace` seconds, then aborted  \\ nobody waits: its steps are dropped until a retry takes them
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from treadle.core.errors import ContextExceeded, StepsExceeded
from treadle.rollout.gateway.request import Answer, ApiError
from treadle.rollout.session import Reply, Session, Unanswered


@dataclass(frozen=True, slots=True)
class Origin:
    """What identifies a request and its retries.

    body: digest of route and body; b"" for a request that was refused unread. retry: the SDK's retry count.
    """

    body: bytes
    key: str | None = None
    retry: int = 0


@dataclass(slots=True, eq=False)
class Exchange:
    """One request with all its retries.

    waiting: connections that want the answer now. retry: highest retry count so far. repeats: the failed request that
    this one is a retry of.
    """

    origin: Origin
    task: asyncio.Task[Answer]
    retry: int
    repeats: Unanswered | None = None
    waiting: int = 0
    delivered: bool = False
    abort: asyncio.TimerHandle | None = None

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the answer and nobody got it."""
        return not self.waiting and not self.delivered


class Exchanges:
    """The exchanges of one session.

    grace: seconds for which sampling goes on when nobody waits any more, so that a retry can join.
    max_running: how many may be sampled at a time.

    Invariant: a step is dropped (as cancelled) exactly while its answer has been given up and never fully delivered.
    A request that failed on this side is answered only by one that came later, and whose answer was delivered.
    """

    def __init__(self, session: Session, grace: float, max_running: int) -> None:
        self._session, self._grace, self._max_running = session, grace, max_running
        self._by_body: dict[bytes, list[Exchange]] = {}
        self._by_key: dict[str, Exchange] = {}
        self._void: Counter[bytes] = Counter()  # requests by body that got no answer, and whose retry is a new sample
        self._running: set[Exchange] = set()

    def find(self, origin: Origin) -> Exchange | None:
        """Return the exchange that this request is a retry of; None for a new sample.

        Among identical requests a retry joins one that nobody waits for or got an answer to, else the newest. Raises
        ApiError for a key that came with another body.
        """
        if origin.key is not None and (exchange := self._by_key.get(origin.key)):
            if exchange.origin.body != origin.body:
                raise ApiError(400, "Idempotency-Key: was sent before with another request", "Idempotency-Key")
            return exchange
        same = self._by_body.get(origin.body, [])
        if origin.key is not None:
            same = [e for e in same if e.origin.key is None]  # another key says that it is another request
        if abandoned := next((e for e in same if e.abandoned), None):
            return abandoned
        if self._void[origin.body]:
            self._void[origin.body] -= 1
            return None
        return next((e for e in reversed(same) if e.retry < origin.retry), None)

    def start(self, origin: Origin, sample: Callable[[], Coroutine[Any, Any, Answer]]) -> Exchange:
        """Start a new exchange. Raises ApiError (429) if too many are being sampled already."""
        repeats = self._take_unanswered(origin)
        if len(self._running) >= self._max_running:
            self._void[origin.body] += 1
            raise ApiError(
                429, f"this session has {self._max_running} requests in flight already; wait for one of them"
            )
        exchange = Exchange(origin, asyncio.create_task(sample()), origin.retry, repeats)
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
        exchange.waiting += 1
        if exchange.abort is not None:
            exchange.abort.cancel()
            exchange.abort = None
        try:
            yield exchange.task
        finally:
            exchange.waiting -= 1
            if exchange.abandoned and exchange.task.done():
                self._set_delivered(exchange, False)
            elif exchange.abandoned:
                exchange.abort = asyncio.get_running_loop().call_later(self._grace, self._abort, exchange)

    def deliver(self, exchange: Exchange) -> None:
        """Record that all of the answer was sent."""
        exchange.delivered, exchange.repeats = True, None
        self._set_delivered(exchange, True)

    def refuse(self, error: ApiError, origin: Origin = Origin(b"")) -> None:
        """Record that a request was refused: as malformed, or for now (429, 503)."""
        if error.status not in (429, 503):
            self._session.bad_requests.append(error.message)
            return
        self._take_unanswered(origin)
        self._session.unanswered.append(Unanswered(origin.body, origin.key, error))

    async def close(self) -> None:
        """Abort what is being sampled; drop the steps of answers that were not delivered, or are said to be unused."""
        running = [exchange.task for exchange in self._running]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for exchange in [exchange for exchanges in self._by_body.values() for exchange in exchanges]:
            if exchange.abort is not None:
                exchange.abort.cancel()
            if not exchange.delivered:
                self._set_delivered(exchange, False)
                self._put_back(exchange)
        for number in [number for number, used in self._session.said_used.items() if not used]:
            self._session.reject(number)

    def _take_unanswered(self, origin: Origin) -> Unanswered | None:
        """Take out the failed request that this one is a retry of, if there is one."""
        failed = self._session.unanswered
        same = [f for f in failed if f.body == origin.body and not (f.key and origin.key and f.key != origin.key)]
        retried = next(iter(same or [f for f in failed if not f.body]), None)
        if retried is not None:
            failed.remove(retried)
        return retried

    def _put_back(self, exchange: Exchange) -> None:
        if exchange.repeats is not None:
            self._session.unanswered.append(exchange.repeats)
            exchange.repeats = None

    def _sampled(self, exchange: Exchange) -> None:
        self._running.discard(exchange)
        error = None if exchange.task.cancelled() else exchange.task.exception()
        if exchange.task.cancelled() or error is not None:
            self._note_failure(exchange, error)
            self._forget(exchange)  # there is no answer to repeat: the next request is a new one
        elif exchange.abandoned:
            self._set_delivered(exchange, False)

    def _note_failure(self, exchange: Exchange, error: BaseException | None) -> None:
        match error:
            case ApiError():
                self.refuse(error, exchange.origin)
            case None | StepsExceeded() | ContextExceeded():
                pass  # cancelled; or limits, which are the model's own doing
            case _ if not exchange.abandoned:  # otherwise its client has given up by itself
                exchange.repeats = Unanswered(exchange.origin.body, exchange.origin.key, error)
        self._put_back(exchange)

    def _abort(self, exchange: Exchange) -> None:
        self._forget(exchange)  # first, so that no retry joins it
        exchange.task.cancel()

    def _set_delivered(self, exchange: Exchange, delivered: bool) -> None:
        if exchange.task.done() and not exchange.task.cancelled() and exchange.task.exception() is None:
            for reply in exchange.task.result().replies:
                if isinstance(reply, Reply):
                    self._session.set_delivered(reply.number, delivered)

    def _forget(self, exchange: Exchange) -> None:
        same = self._by_body.get(exchange.origin.body, [])
        if exchange in same:
            same.remove(exchange)
            self._void[exchange.origin.body] += 1
            if exchange.origin.key is not None:
                del self._by_key[exchange.origin.key]
        if not same:
            self._by_body.pop(exchange.origin.body, None)
