"""The gateway's routes: who asks, how large the request may be, which dialect it speaks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treadle.core.errors import ContextExceeded, DataError
from treadle.core.untrusted_json import read_json
from treadle.rollout.gateway.chat_completions import CHAT
from treadle.rollout.gateway.completions import COMPLETIONS
from treadle.rollout.gateway.gateway import Attached, Gateway
from treadle.rollout.gateway.http_response import CompletionResponse, api_error_of
from treadle.rollout.gateway.messages import MESSAGES, read_prompt
from treadle.rollout.gateway.request import ApiError, Dialect, Json
from treadle.rollout.gateway.responses import RESPONSES
from treadle.rollout.gateway.retries import Origin

Handler = Callable[[Request], Awaitable[Response]]

DIALECTS = {
    "/chat/completions": CHAT,
    "/completions": COMPLETIONS,
    "/responses": RESPONSES,
    "/messages": MESSAGES,
}
_COUNTING = "/messages/count_tokens"


def make_app(gateway: Gateway) -> Starlette:
    """Return the ASGI application, every route both with the session's secret in its path and with it as API key."""
    posts = {path: _asking(gateway, dialect) for path, dialect in DIALECTS.items()}
    posts[_COUNTING] = _counting(gateway)
    routes = []
    for prefix in ("/sessions/{secret}/v1", "/v1"):
        routes += [Route(prefix + path, handler, methods=["POST"]) for path, handler in posts.items()]
        routes.append(Route(f"{prefix}/models", _listing(gateway), methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={ApiError: _api_error, HTTPException: _no_route})
    app.router.redirect_slashes = False
    return app


def _asking(gateway: Gateway, dialect: Dialect) -> Handler:
    async def ask(request: Request) -> Response:
        with ExitStack() as held:
            attached, raw = await _received(gateway, request, held)
            exchanges, origin = attached.exchanges, _origin(request, dialect, raw)
            try:
                completion = dialect.read(_json(raw))
                exchange = exchanges.find(origin)
                if exchange is None:
                    exchange = exchanges.start(origin, partial(attached.answer, completion, dialect.new_id()))
                    release = held.pop_all().close
                    exchange.task.add_done_callback(lambda _: release())
            except ApiError as error:
                exchanges.refuse(error, origin)
                raise
        return CompletionResponse(dialect, exchanges, exchange, origin, completion.stream)

    return ask


def _counting(gateway: Gateway) -> Handler:
    async def count_tokens(request: Request) -> Response:
        with ExitStack() as held:
            attached, raw = await _received(gateway, request, held)
            messages, tools, prefilled = read_prompt(_json(raw))
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


def _session(gateway: Gateway, request: Request) -> Attached:
    """Return the session of a request. Raises ApiError, the same for an expired secret and an unknown one."""
    in_path = request.path_params.get("secret")
    if in_path is not None:
        attached = gateway.find(in_path)
        if attached is None:
            raise ApiError(404, "unknown or expired session")
        return attached
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    secret = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    attached = gateway.find(secret)
    if attached is None:
        raise ApiError(401, "the API key belongs to no session, or to one that has ended", code="invalid_api_key")
    return attached


async def _received(gateway: Gateway, request: Request, held: ExitStack) -> tuple[Attached, bytes]:
    """Return the session of a request, and its body, whose bytes count as in flight until `held` is closed.

    Raises ApiError: before reading anything if there is no such session; where a limit is exceeded, without reading on.
    """
    attached = _session(gateway, request)
    chunks: list[bytes] = []
    size = 0

    def release() -> None:
        attached.bytes_in_flight -= size

    held.callback(release)
    try:
        async for chunk in request.stream():
            size += len(chunk)
            attached.bytes_in_flight += len(chunk)
            if size > gateway.max_body:
                raise ApiError(413, f"the request is larger than {gateway.max_body} bytes")
            if attached.bytes_in_flight > gateway.max_bytes_in_flight:
                limit = f"{gateway.max_bytes_in_flight} bytes of requests"
                raise ApiError(429, f"this session has more than {limit} in flight; wait for one of them")
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ApiError(400, "the client disconnected while sending the request") from error
    except ApiError as error:
        attached.exchanges.refuse(error)
        raise
    return _session(gateway, request), b"".join(chunks)  # again: it may have ended meanwhile


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
    digest = hashlib.sha256(dialect.prefix.encode())
    digest.update(raw)
    count = request.headers.get("x-stainless-retry-count", "0")
    return Origin(
        body=digest.digest(),
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
