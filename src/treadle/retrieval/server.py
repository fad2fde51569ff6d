"""The retrieval server's routes: `POST /retrieve` as Search-R1 and SkyRL have it, `GET /health`.

{"queries": ["where is Acme Motors?"], "topk": 3, "return_scores": true}
{"result": [[{"document": {"id": "17", "contents": "..."}, "score": 8.25}, ...]]}
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field, model_validator

from treadle.retrieval.queue import Overloaded, RetrievalQueue, ScoredPassage

MOST_PASSAGES = 100
"""Largest `topk`."""


class RetrieveRequest(BaseModel):
    """Body of a request: `queries`, or one `query`, whose result is a list of one. `queries` goes first."""

    queries: list[str] | None = None
    query: str | None = None
    topk: int | None = Field(None, ge=1, le=MOST_PASSAGES, description="passages a query; default: the server's")
    return_scores: bool = Field(False, description="whether documents come with their scores")

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if self.queries is None and self.query is None:
            raise ValueError("give 'queries', a list, or 'query', a text")
        return self

    @property
    def texts(self) -> list[str]:
        return self.queries if self.queries is not None else [str(self.query)]


def make_app(queue: RetrievalQueue, topk: int = 3) -> FastAPI:
    """Return the server's application. topk: passages for queries that name no number."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        queue.close()

    app = FastAPI(title="Treadle retrieval", lifespan=lifespan)

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> Response:
        try:
            results = await queue.search(request.texts, request.topk or topk)
        except Overloaded as error:
            return _json({"detail": str(error)}, 503, {"Retry-After": "1"})
        return _json({"result": [[_document(hit, request.return_scores) for hit in row] for row in results]})

    @app.exception_handler(UnicodeDecodeError)
    @app.exception_handler(RecursionError)
    async def unreadable(_: Request, error: Exception) -> Response:
        return _json({"detail": f"the body is not JSON in UTF-8: {type(error).__name__}"}, 400)

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    return app


def _document(hit: ScoredPassage, with_score: bool) -> Any:
    return {"document": hit.passage, "score": hit.score} if with_score else hit.passage


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, "application/json")
