"""The gateway's routes: who asks, how large the request may be, which dialect it speaks."""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from treadle.core.errors import ContextExceeded, DataError
from treadle.core.text import read_json
from treadle.rollout.gateway.chat_completions import CHAT
from treadle.rollout.gateway.completions import COMPLETIONS
from treadle.rollout.gateway.gateway import Attached, Gateway
from treadle.rollout.gateway.http_response import CompletionResponse, api_error_of, retry_after
from treadle.rollout.gateway.messages import MESSAGES, read_prompt
from treadle.rollout.gateway.request import ApiError, Dialect, Json
from treadle.rollout.gateway.responses import RESPONSES
from treadle.rollout.gateway.retries import Origin

DIALECTS = {"/chat/completions": CHAT, "/completions": COMPLETIONS, "/responses": RESPONSES, "/messages": MESSAGES}
_COUNTING = "/messages/count_tokens"


def make_app(gateway: Gateway) -> Starlette:
    """Build the ASGI application. Each route exists with the session's secret in its path and with it as API key."""
    routes = []
    for prefix in ("/sessions/{secret}/v1", "/v1"):
        for path, dialect in DIALECTS.items():
            routes.append(Route(prefix + path, partial(_complete, gateway, dialect), methods=["POST"]))
        routes.append(Route(prefix + _COUNTING, partial(_count_tokens, gateway), methods=["POST"]))
        routes.append(Route(f"{prefix}/models", partial(_list_models, gateway), methods=["GET"]))
    app = Starlette(routes=routes, exception_handlers={ApiError: _api_error, HTTPException: _no_route})
    app.router.redirect_slashes = False
    return app


async def _complete(gateway: Gateway, dialect: Dialect, request: Request) -> Response:
    with ExitStack() as in_flight:
        attached, raw = await _receive(gateway, request, in_flight)
        exchanges, origin = attached.exchanges, _origin(request, dialect, raw)
        try:
            completion = dialect.read(_json(raw))
            exchange = exchanges.find(origin)
            if exchange is None:
                exchange = exchanges.start(origin, partial(attached.answer, completion, dialect.new_id()))
                release = in_flight.pop_all().close
                exchange.task.add_done_callback(lambda _: release())
        except ApiError as error:
            exchanges.refuse(error, origin)
            raise
    return CompletionResponse(dialect, exchanges, exchange, origin, completion.stream)


async def _count_tokens(gateway: Gateway, request: Request) -> Response:
    with ExitStack() as in_flight:
        attached, raw = await _receive(gateway, request, in_flight)
        messages, tools, prefilled = read_prompt(_json(raw))
        try:
            return JSONResponse({"input_tokens": await attached.session.count(messages, tools, prefilled)})
        except (DataError, ContextExceeded) as error:
            raise api_error_of(error) from error


async def _list_models(gateway: Gateway, request: Request) -> Response:
    _session(gateway, request)
    openai = {"object": "model", "created": 0, "owned_by": "treadle"}
    anthropic = {"type": "model", "display_name": gateway.model, "created_at": "1970-01-01T00:00:00Z"}
    model = {"id": gateway.model, **openai, **anthropic}
    return JSONResponse({"object": "list", "data": [model], "has_more": False})


def _session(gateway: Gateway, request: Request) -> Attached:
    """Find the session of a request. Raises ApiError, the same for an expired secret and an unknown one."""
    if (in_path := request.path_params.get("secret")) is not None:
        if attached := gateway.find(in_path):
            return attached
        raise ApiError(404, "unknown or expired session")
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    secret = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    if attached := gateway.find(secret):
        return attached
    raise ApiError(401, "the API key belongs to no session, or to one that has ended", code="invalid_api_key")


async def _receive(gateway: Gateway, request: Request, in_flight: ExitStack) -> tuple[Attached, bytes]:
    """Find a request's session and read its body, whose bytes count as in flight until the stack is closed.

    Raises ApiError: before reading if there is no such session; at a limit, without reading on.
    """
    attached = _session(gateway, request)
    chunks: list[bytes] = []
    size = 0

    def release() -> None:
        attached.bytes_in_flight -= size

    in_flight.callback(release)
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
    return JSONResponse(_dialect_of(request).error(error), error.status, retry_after(error.status))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = ApiError(error.status_code, f"{request.method} of this path: {error.detail}")
    return JSONResponse(_dialect_of(request).error(problem), error.status_code, error.headers)


def _dialect_of(request: Request) -> Dialect:
    if "anthropic-version" in request.headers:
        return MESSAGES
    routes = {**DIALECTS, _COUNTING: MESSAGES}
    return next((dialect for path, dialect in routes.items() if request.url.path.endswith(path)), CHAT)
