"""A gateway on a socket."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from treadle.core.errors import ContextExceeded, DataError, EngineError, FormError, StepsExceeded
from treadle.core.rewards import LARGEST
from treadle.core.text import read_json
from treadle.rollout.config import GatewayConfig, listen, url_of
from treadle.rollout.gateway.chat_completions import CHAT, COMPLETIONS
from treadle.rollout.gateway.gateway import Access, ClientSession, Gateway
from treadle.rollout.gateway.messages import MESSAGES, CountRequest
from treadle.rollout.gateway.request import Answer, ApiError, Dialect, Json, Number, RequestModel, Text, read
from treadle.rollout.gateway.responses import RESPONSES
from treadle.rollout.gateway.retries import Exchange, Exchanges, GivenUp, Origin

_LOOPBACK = GatewayConfig()
_READY = 0.005  # seconds between checks whether the server listens
_CONNECTIONS = 16384  # a quarter of the files allowed by `SharedGateway`; beyond it, uvicorn answers 503


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Filter out requests that end with the run: their tasks, or tasks they wait for, were cancelled."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError | KeyboardInterrupt)


logging.getLogger("uvicorn.error").addFilter(_is_worth_logging)


class _Server(uvicorn.Server):
    """Leaves signals to the owner of the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(
    gateway: Gateway, config: GatewayConfig = _LOOPBACK, listening: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve the gateway inside the context; yield the URL for agents, `http://127.0.0.1:54321`.

    config: by default a free port on the loopback interface. listening: a socket already open.
    Raises ConfigError if the address is not available.
    """
    with listening or listen(config) as listening:
        gateway.url = config.advertised_url or url_of(listening)
        async with running(make_app(gateway), listening):
            try:
                yield gateway.url
            finally:
                await gateway.close()


@asynccontextmanager
async def running(app: Starlette, listening: socket.socket) -> AsyncIterator[None]:
    """Serve an application on an open socket inside the context."""
    server = _Server(
        uvicorn.Config(
            app,
            http="h11",  # which limits headers to 16 KiB
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,  # paths hold secrets
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=2,
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(_READY)
        yield
    finally:
        server.should_exit = True
        await task


DIALECTS = {"/chat/completions": CHAT, "/completions": COMPLETIONS, "/responses": RESPONSES, "/messages": MESSAGES}
_COUNTING = "/messages/count_tokens"


def make_app(gateway: Gateway) -> Starlette:
    """Build the ASGI application. Each route takes the session's secret in its path or as API key."""
    routes = []
    for prefix in ("/sessions/{secret}/v1", "/v1"):
        for path, dialect in DIALECTS.items():
            routes.append(Route(prefix + path, partial(_complete, gateway, dialect), methods=["POST"]))
        routes.append(Route(prefix + _COUNTING, partial(_count_tokens, gateway), methods=["POST"]))
        routes.append(Route(f"{prefix}/models", partial(_list_models, gateway), methods=["GET"]))
        for name, handle in (("sessions", _open_session), ("reward", _reward), ("close", _close_session)):
            routes.append(Route(f"{prefix}/{name}", partial(handle, gateway), methods=["POST"]))
    app = Starlette(routes=routes, exception_handlers={ApiError: _error, HTTPException: _error})
    app.router.redirect_slashes = False
    return app


async def _complete(gateway: Gateway, dialect: Dialect, request: Request) -> CompletionResponse:
    with ExitStack() as in_flight:
        attached, raw = await _receive(gateway, request, in_flight)
        exchanges = attached.exchanges
        origin = replace(_unread(request), body=hashlib.sha256(dialect.prefix.encode() + raw).digest())
        try:
            attached.take_verdicts(request.headers)
            completion = await gateway.images.read(raw, lambda images: dialect.read(_json(raw), images))
            await gateway.images.finish(completion.messages, attached.images)
            attached = _session(gateway, request)  # again: reading images takes time
            await exchanges.settle(origin)
            exchange = exchanges.find(origin)
            if exchange is None:
                exchange = exchanges.start(
                    origin, partial(attached.answer, completion, dialect.prefix + secrets.token_hex(12))
                )
                release = in_flight.pop_all().close
                exchange.task.add_done_callback(lambda _: release())
        except ApiError as error:
            exchanges.refuse(error, origin)
            raise
    return CompletionResponse(dialect, exchanges, exchange, origin, completion.stream)


async def _count_tokens(gateway: Gateway, request: Request) -> Response:
    with ExitStack() as in_flight:
        attached, raw = await _receive(gateway, request, in_flight)
        messages, tools, prefilled = await gateway.images.read(
            raw, lambda images: read(CountRequest, _json(raw), images).prompt()
        )
        await gateway.images.finish(messages, attached.images)
        try:
            return JSONResponse({"input_tokens": await attached.session.count(messages, tools, prefilled)})
        except (DataError, ContextExceeded) as error:
            raise _api_error(error) from error


async def _list_models(gateway: Gateway, request: Request) -> Response:
    models = _session(gateway, request).access.models
    openai = {"object": "model", "created": 0, "owned_by": "treadle"}
    anthropic = {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
    names = (gateway.model, *(models or ()))
    listed = [{"id": name, **openai, **anthropic, "display_name": name} for name in names]
    return JSONResponse({"object": "list", "data": listed, "has_more": False})


class OpenRequest(RequestModel):
    task_id: Text = ""


class RewardRequest(RequestModel):
    """id: id of an answer, to reward its conversation."""

    reward: Annotated[Number, Field(ge=-LARGEST, le=LARGEST)]
    id: Text | None = None


async def _open_session(gateway: Gateway, request: Request) -> Response:
    """Open a session for a new trajectory, authorized by the key of `treadle serve`."""
    with ExitStack() as in_flight:
        attached, raw = await _receive(gateway, request, in_flight)
        if attached.access.opens is None:
            raise ApiError(404, "this key opens no sessions: start treadle serve with --record, and use its own key")
        session, recorder = attached.access.opens(read(OpenRequest, _json(raw or b"{}")).task_id)
        address = gateway.attach(session, Access(recorder=recorder)).address
    urls = {"base_url": address.base_url, "anthropic_url": address.anthropic_url}
    return JSONResponse({"id": recorder.ident, **urls, "api_key": address.secret})


async def _reward(gateway: Gateway, request: Request) -> Response:
    with ExitStack() as in_flight:
        attached, raw = await _receive(gateway, request, in_flight)
        if attached.access.recorder is None:
            raise ApiError(404, "rewards are not recorded here: start treadle serve with --record")
        given, numbers, remedy = read(RewardRequest, _json(raw)), list[int](), "give that of the conversation's answer"
        if given.id is not None:
            numbers = attached.numbers(given.id, "id", remedy)
        elif not attached.access.recorder.ident:
            raise ApiError(400, f"id: this key covers several conversations; {remedy}, or open a session", "id")
        attached.access.recorder.reward(given.reward, numbers)
    return JSONResponse({})


async def _close_session(gateway: Gateway, request: Request) -> Response:
    attached = _session(gateway, request)
    if attached.access.recorder is None or attached.access.opens is not None:
        raise ApiError(404, "this session was not opened by a client, and is not closed by one")
    await gateway.detach(_secret(request))
    return JSONResponse({})


def _unread(request: Request) -> Origin:
    """Identify a request by its headers."""
    headers, count = request.headers, request.headers.get("x-stainless-retry-count", "0")
    length = f"{request.url.path} {headers.get('content-length')}".encode()
    retry = int(count) if re.fullmatch(r"[0-9]{1,6}", count) else 0
    return Origin(length, headers.get("idempotency-key") or None, retry, unread=length)


def _secret(request: Request) -> str:
    if (in_path := request.path_params.get("secret")) is not None:
        return str(in_path)
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _session(gateway: Gateway, request: Request) -> ClientSession:
    """Find the session of a request. Raises the same ApiError for an expired secret as for an unknown one."""
    if attached := gateway.find(_secret(request)):
        return attached
    if "secret" in request.path_params:
        raise ApiError(404, "unknown or expired session")
    remedy = "use the key printed by treadle serve, or an open session's"
    raise ApiError(401, f"the API key is wrong, or its session has ended; {remedy}", code="invalid_api_key")


async def _receive(gateway: Gateway, request: Request, in_flight: ExitStack) -> tuple[ClientSession, bytes]:
    """Find a request's session and read its body, counted as in flight until the stack is closed.

    Raises ApiError: before reading if there is no such session; at a limit, without reading further.
    """
    attached = _session(gateway, request)
    chunks: list[bytes] = []
    size, began = 0, time.monotonic()

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
        attached.exchanges.lose(GivenUp(time.monotonic() - began), _unread(request))
        raise ApiError(400, "the client disconnected while sending the request") from error
    except ApiError as error:
        attached.exchanges.refuse(error, _unread(request))
        raise
    # Again: it may have ended meanwhile.
    return _session(gateway, request), b"".join(chunks)


def _json(raw: bytes) -> Json:
    try:
        value = read_json(raw.decode())
    except ValueError as error:
        raise ApiError(400, f"the request's body is not JSON in UTF-8: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the request's body must be a JSON object, got {type(value).__name__}")
    return value


_BASE_URL = "the base URL ends in /v1, except for Anthropic's clients, which add it"


async def _error(request: Request, error: Exception) -> Response:
    headers = None
    if isinstance(error, HTTPException):  # no such route
        remedy = f"; {_BASE_URL}" if error.status_code == 404 else ""
        what = f"{request.method} of this path: {error.detail}{remedy}"
        headers, error = error.headers, ApiError(error.status_code, what)
    assert isinstance(error, ApiError)
    routes = {**DIALECTS, _COUNTING: MESSAGES}
    dialect = next((dialect for path, dialect in routes.items() if request.url.path.endswith(path)), CHAT)
    dialect = MESSAGES if "anthropic-version" in request.headers else dialect
    return JSONResponse(dialect.error(error), error.status, headers or _retry_after(error.status))


_JSON, _EVENTS = "application/json", "text/event-stream; charset=utf-8"
KEEP_ALIVE = 10.0  # seconds of silence before a stream sends a comment


@dataclass
class CompletionResponse:
    """Waits for an exchange's answer and sends it, unless the client disconnects.

    A stream begins with the answer, or with a comment after `KEEP_ALIVE` seconds; until then a failure has its status.
    """

    dialect: Dialect
    exchanges: Exchanges
    exchange: Exchange
    origin: Origin
    stream: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.exchanges.waiting(self.exchange, self.origin) as task:
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                has_begun = await self._wait(task, gone, send)
                if not gone.done():
                    await self._send(task, gone, send, has_begun)
            finally:
                gone.cancel()

    async def _wait(self, task: asyncio.Task[Answer], gone: asyncio.Task[None], send: Send) -> bool:
        """Wait for the answer or for the client's departure; return whether a stream has begun."""
        has_begun, timeout = False, KEEP_ALIVE if self.stream else None
        while True:
            done, _ = await asyncio.wait({task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return has_begun
            if not has_begun:
                await _start(send, 200, _EVENTS)
            await _body(send, b": keep-alive\n\n")
            has_begun = True

    async def _send(self, task: asyncio.Task[Answer], gone: asyncio.Task[None], send: Send, has_begun: bool) -> None:
        if task.cancelled():
            outcome: Answer | ApiError = ApiError(404, "the session has ended")
        else:
            outcome = task.result() if (error := task.exception()) is None else _api_error(error)
        if isinstance(outcome, ApiError):
            text = self.dialect.error_event(outcome) if has_begun else json.dumps(self.dialect.error(outcome))
            status, content = outcome.status, _JSON
        elif self.stream:
            status, content, text = 200, _EVENTS, "".join(self.dialect.events(outcome))
        else:
            status, content, text = 200, _JSON, json.dumps(self.dialect.write(outcome))
        if not has_begun:
            await _start(send, status, content, len(text))  # all ASCII: characters are bytes
        await _body(send, text.encode())
        # Returns once the connection has taken the answer.
        await _body(send, b"", more=False)
        if isinstance(outcome, Answer) and not gone.done():
            self.exchanges.deliver(self.exchange)


def _api_error(error: BaseException) -> ApiError:
    """Convert a call's error for its client. Reraises the exception itself if it is a bug."""
    match error:
        case ApiError():
            return error
        case ContextExceeded():
            return ApiError(400, str(error), "messages", "context_length_exceeded")
        case StepsExceeded():
            return ApiError(400, str(error), code="max_steps_exceeded")
        case FormError():
            return ApiError(400, str(error), error.where)
        case DataError():
            return ApiError(400, str(error))
        case EngineError():
            return ApiError(503, f"the engine failed: {error}")
    raise error


def _retry_after(status: int) -> dict[str, str]:
    return {"retry-after": "1"} if status in (429, 503) else {}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, status: int, content: str, length: int | None = None) -> None:
    headers = {"content-type": content, "cache-control": "no-store", **_retry_after(status)}
    if length is not None:
        headers["content-length"] = str(length)
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def _body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
