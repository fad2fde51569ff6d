"""The retrieval server's routes: `POST /retrieve` as in Search-R1 and SkyRL, `GET /health`.

{"queries": ["where is Acme Motors?"], "topk": 3, "return_scores": true}
{"result": [[{"document": {"id": "17", "contents": "..."}, "score": 8.25}, ...]]}
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Any, NamedTuple, Self

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field, ValidationError, model_validator

from treadle.core.errors import TreadleError
from treadle.core.text import read_json
from treadle.retrieval.corpus import Corpus, Passage, Retriever


class ScoredPassage(NamedTuple):
    """A passage and its score for a query."""

    passage: Passage
    score: float


class Overloaded(TreadleError, RuntimeError):
    """Raised if a query cannot be answered soon enough."""


class _Waiting(NamedTuple):
    query: str
    topk: int
    answer: asyncio.Future[list[ScoredPassage]]


class RetrievalQueue:
    """Answers queries in a thread, so that the event loop stays free to accept and refuse requests.

    Batches as many waiting queries as the retriever wants (`Retriever.batch`).

    most_waiting: number of queries that may wait; more are refused. timeout: seconds that a request may take.
    """

    def __init__(
        self,
        passages: Corpus | Sequence[Passage],
        retriever: Retriever,
        most_waiting: int = 4096,
        timeout: float = 20.0,
    ) -> None:
        self._passages, self._retriever = passages, retriever
        self._most_waiting, self._timeout = most_waiting, timeout
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, "retrieval")
        self._worker: asyncio.Task[None] | None = None

    async def search(self, queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
        """Return at most `topk` passages for each query, best first.

        Raises Overloaded if too many queries wait, or these have waited for too long.
        """
        self._waiting = deque(waiting for waiting in self._waiting if not waiting.answer.done())
        if self._waiting and len(self._waiting) + len(queries) > self._most_waiting:
            raise Overloaded(f"{len(self._waiting)} queries are waiting; try again later")
        loop = asyncio.get_running_loop()
        added = [_Waiting(query, topk, loop.create_future()) for query in queries]
        self._waiting.extend(added)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        try:
            return await asyncio.wait_for(asyncio.gather(*(one.answer for one in added)), self._timeout)
        except TimeoutError as error:
            raise Overloaded(f"no answer within {self._timeout:g} s; try again later") from error

    def close(self) -> None:
        """End the thread after its current batch."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if not (batch := self._next_batch()):
                continue
            searching = loop.run_in_executor(self._thread, self._find, [one.query for one in batch], batch[0].topk)
            await asyncio.wait({searching})
            error: Any = searching.exception()
            for number, one in enumerate(batch):
                if one.answer.done():  # abandoned meanwhile
                    continue
                if error is not None:
                    one.answer.set_exception(error)
                else:
                    one.answer.set_result(searching.result()[number])

    def _next_batch(self) -> list[_Waiting]:
        """Take the next queries for one call of the retriever, of the same `topk`; skips abandoned ones."""
        first = self._waiting[0]
        alike = takewhile(lambda one: one.topk == first.topk, self._waiting)
        batch = [one for one, _ in zip(alike, range(self._retriever.batch), strict=False)]
        for _ in batch:
            self._waiting.popleft()
        return [one for one in batch if not one.answer.done()]

    def _find(self, queries: list[str], topk: int) -> list[list[ScoredPassage]]:
        rows = self._retriever.search(queries, topk)
        return [[ScoredPassage(self._passages[hit.passage], hit.score) for hit in hits] for hits in rows]


MOST_PASSAGES = 100
"""Largest `topk`."""

MOST_BYTES = 16 * 2**20
"""Largest request."""


class RetrieveRequest(BaseModel):
    """Body of a request: `queries`, or one `query`, which returns a list of one. `queries` takes precedence."""

    queries: list[str] | None = None
    query: str | None = None
    topk: int | None = Field(None, ge=1, le=MOST_PASSAGES, description="passages a query; default: the server's")
    return_scores: bool = Field(False, description="whether documents come with their scores")

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if self.queries is None and self.query is None:
            raise ValueError("give 'queries', a list, or 'query', a text")
        return self


def make_app(queue: RetrievalQueue, topk: int = 3) -> FastAPI:
    """Return the server's application. topk: default number of passages per query."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        queue.close()

    app = FastAPI(title="Treadle retrieval", lifespan=lifespan)

    @app.post("/retrieve")
    async def retrieve(http: Request) -> Response:
        try:
            request = RetrieveRequest.model_validate(read_json((await _body(http)).decode()))
        except _TooLarge as error:
            return _json({"detail": str(error)}, 413)
        except ValidationError as error:
            return _json({"detail": error.errors(include_url=False, include_context=False, include_input=False)}, 422)
        except ValueError as error:
            return _json({"detail": f"the body is not JSON in UTF-8: {error}"}, 400)
        try:
            queries = request.queries if request.queries is not None else [str(request.query)]
            results = await queue.search(queries, request.topk or topk)
        except Overloaded as error:
            return _json({"detail": str(error)}, 503, {"Retry-After": "1"})
        bare = not request.return_scores
        rows = [
            [hit.passage if bare else {"document": hit.passage, "score": hit.score} for hit in row] for row in results
        ]
        return _json({"result": rows})

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    return app


class _TooLarge(ValueError):
    pass


async def _body(request: Request) -> bytes:
    """Return the request's body. Raises _TooLarge before reading the rest of it."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MOST_BYTES:
            raise _TooLarge(f"the request is larger than {MOST_BYTES} bytes; ask for fewer queries at once")
        chunks.append(chunk)
    return b"".join(chunks)


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, "application/json")
