"""The gateway's routes: who asks, how large the request may be, which dialect it speaks."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import cache, partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from treadle import __version__
from treadle.core.errors import ContextExceeded, DataError
from treadle.core.untrusted_json import read_json
from treadle.rendering.off_loop import off_loop
from treadle.rollout.gateway.chat_completions import CHAT
from treadle.rollout.gateway.completions import COMPLETIONS
from treadle.rollout.gateway.gateway import Attached, Gateway
from treadle.rollout.gateway.http_response import CompletionResponse, api_error_of
from treadle.rollout.gateway.messages import MESSAGES, CountRequest, read_prompt
from treadle.rollout.gateway.request import ApiError, Dialect, Json
from treadle.rollout.gateway.responses import RESPONSES
from treadle.rollout.gateway.retries import Origin
from treadle.rollout.gateway.schemas import Schema, described, error_responses, request_schemas

Handler = Callable[[Request], Awaitable[Response]]

_QUICKER = 16  # times as fast as tokenizing a request: reading it
_DRAINED = 8  # a body up to this many times too large is still read, so that its sender sees the answer
DIALECTS = {
    "/chat/completions": CHAT,
    "/completions": COMPLETIONS,
    "/responses": RESPONSES,
    "/messages": MESSAGES,
}
_COUNTING = "/messages/count_tokens"


@cache
def _request_schemas() -> tuple[dict[str, Schema], Schema]:
    models = {path: dialect.body for path, dialect in DIALECTS.items()}
    return request_schemas({**models, _COUNTING: CountRequest})


def make_app(gateway: Gateway) -> FastAPI:
    """Return the ASGI application, every route both with the session's secret in its path and with it as API key."""
    app = FastAPI(title="Treadle gateway", version=__version__, openapi_url=None, redirect_slashes=False)
    requests, components = _request_schemas()
    for prefix in ("/v1", "/sessions/{secret}/v1"):
        routes = {path: _asking(gateway, dialect) for path, dialect in DIALECTS.items()}
        for path, handler in {**routes, _COUNTING: _counting(gateway)}.items():
            app.add_api_route(
                prefix + path, handler, methods=["POST"], response_model=None, **described(requests[path])
            )
        app.add_api_route(f"{prefix}/models", _listing(gateway), methods=["GET"], responses=error_responses())
        app.add_api_route(
            f"{prefix}/openapi.json", _description(gateway, app, components), methods=["GET"], include_in_schema=False
        )
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _no_route)
    return app


def _asking(gateway: Gateway, dialect: Dialect) -> Handler:
    async def ask(request: Request) -> Response:
        with ExitStack() as held:
            attached, raw = await _received(gateway, request, held)
            exchanges, rendered = attached.exchanges, ExitStack()
            origin = await off_loop(len(raw) // _QUICKER, _origin, request, dialect, raw)
            try:
                completion = await off_loop(len(raw) // _QUICKER, lambda: dialect.read(_json(raw)))
                exchange = exchanges.find(origin)
                if exchange is None:
                    exchange = exchanges.start(
                        origin, partial(attached.answer, completion, dialect.new_id(), rendered.close)
                    )
                    rendered.push(held.pop_all())
                    exchange.task.add_done_callback(lambda _: rendered.close())
            except ApiError as error:
                exchanges.refuse(error, origin)
                raise
        return CompletionResponse(dialect, exchanges, exchange, origin, completion.stream)

    return ask


def _counting(gateway: Gateway) -> Handler:
    async def count_tokens(request: Request) -> Response:
        with ExitStack() as held:
            attached, raw = await _received(gateway, request, held)
            messages, tools, prefilled = await off_loop(len(raw) // _QUICKER, lambda: read_prompt(_json(raw)))
            try:
                return JSONResponse({"input_tokens": await attached.session.count(messages, tools, prefilled)})
            except (DataError, ContextExceeded) as error:
                raise api_error_of(error) from error

    return count_tokens


def _listing(gateway: Gateway) -> Handler:
    async def models(request: Request) -> Response:
        _session(gateway, request)
        openai = {"object": "model", "created": 0, "owned_by": "treadle"}
        anthropic = {"type": "model", "display_name": gateway.model, "created_at": "1970-01-01T00:00:00Z"}
        model = {"id": gateway.model, **openai, **anthropic}
        return JSONResponse({"object": "list", "data": [model], "has_more": False})

    return models


def _description(gateway: Gateway, app: FastAPI, components: Json) -> Handler:
    async def openapi(request: Request) -> Response:
        _session(gateway, request)
        return JSONResponse({**app.openapi(), "components": {"schemas": components}})

    return openapi


def _session(gateway: Gateway, request: Request) -> Attached:
    """Return the session of a request. Raises ApiError, the same for an expired secret and an unknown one."""
    in_path = request.path_params.get("secret")
    if in_path is not None:
        attached = gateway.find(in_path)
        if attached is None:
            raise ApiError(404, "there is no such session; it may have ended")
        return attached
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    secret = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    attached = gateway.find(secret)
    if attached is None:
        raise ApiError(401, "the API key opens no session; it may have ended", code="invalid_api_key")
    return attached


async def _received(gateway: Gateway, request: Request, held: ExitStack) -> tuple[Attached, bytes]:
    """Return the session of a request, and its body. held: gives the body's bytes back. Raises ApiError."""
    attached = _session(gateway, request)  # nothing is read from those who have no session
    length = request.headers.get("content-length", "")
    size = min(int(length), gateway.max_body) if length.isdecimal() else gateway.max_body
    for memory, status, whose in ((attached.memory, 429, "this session"), (gateway.memory, 503, "this gateway")):
        try:
            async with asyncio.timeout(gateway.patience):
                await memory.take(size)
        except TimeoutError as error:
            text = (
                f"{whose} has {memory.most} bytes of requests to read and render already; wait for them, then try again"
            )
            refused = ApiError(status, text)
            attached.exchanges.refuse(refused)
            raise refused from error
        held.callback(memory.give, size)
    raw = await _body(request, gateway.max_body)
    if raw is None:
        too_large = ApiError(413, f"the request is larger than {gateway.max_body} bytes")
        attached.exchanges.refuse(too_large)
        raise too_large
    return _session(gateway, request), raw  # again: it may have ended while the body was on its way


async def _body(request: Request, limit: int) -> bytes | None:
    """The request's body; None if it is too large."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > limit * _DRAINED:
                break
    except ClientDisconnect as error:
        raise ApiError(400, "the request broke off") from error
    return b"".join(chunks) if size <= limit else None


def _json(raw: bytes) -> Json:
    """The body as an object. Raises ApiError."""
    try:
        value = read_json(raw.decode())
    except ValueError as error:
        raise ApiError(400, f"the request's body is not JSON in UTF-8: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the request's body must be a JSON object, got {type(value).__name__}")
    return value


def _origin(request: Request, dialect: Dialect, raw: bytes) -> Origin:
    count = request.headers.get("x-stainless-retry-count", "0")
    return Origin(
        body=hashlib.sha256(dialect.prefix.encode() + raw).digest(),
        key=request.headers.get("idempotency-key") or None,
        retry=int(count) if re.fullmatch(r"[0-9]{1,6}", count) else 0,
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"retry-after": "1"} if error.status in (429, 503) else None
    return JSONResponse(_dialect_of(request).error(error), error.status, headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = ApiError(error.status_code, f"{request.method} of this path: {error.detail}")
    return JSONResponse(_dialect_of(request).error(problem), error.status_code, error.headers)


def _dialect_of(request: Request) -> Dialect:
    """The dialect in which an error is put."""
    if "anthropic-version" in request.headers:
        return MESSAGES
    routes = {**DIALECTS, _COUNTING: MESSAGES}
    return next((d for path, d in routes.items() if request.url.path.endswith(path)), CHAT)
