"""Sending an answer while somebody is there to read it."""

from __future__ import annotations

import asyncio
import json

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from treadle.core.errors import ContextExceeded, DataError, EngineError, StepsExceeded
from treadle.rollout.gateway.request import Answer, ApiError, Dialect
from treadle.rollout.gateway.retries import Exchange, Exchanges, Origin

_JSON, _EVENTS = "application/json", "text/event-stream; charset=utf-8"
KEEP_ALIVE = 10.0
"""Seconds of silence after which a stream sends a comment."""


class CompletionResponse(Response):
    """Waits for an exchange's answer and sends it; reports to the exchange once all of it was sent.

    A stream begins with the answer, or with a comment after `KEEP_ALIVE` seconds; until then a failure has its status.
    """

    def __init__(
        self, dialect: Dialect, exchanges: Exchanges, exchange: Exchange, origin: Origin, stream: bool
    ) -> None:
        self._dialect, self._exchanges, self._exchange = dialect, exchanges, exchange
        self._origin, self._stream = origin, stream
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exchanges.waiting(self._exchange, self._origin) as task:
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                has_begun = await self._wait(task, gone, send)
                if not gone.done():
                    await self._send(task, gone, send, has_begun)
            finally:
                gone.cancel()

    async def _wait(self, task: asyncio.Task[Answer], gone: asyncio.Task[None], send: Send) -> bool:
        """Wait until there is an answer or the client has gone; return whether a stream has begun."""
        has_begun, timeout = False, KEEP_ALIVE if self._stream else None
        while True:
            done, _ = await asyncio.wait({task, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return has_begun
            if not has_begun:
                await _start(send, 200, _EVENTS)
            await _body(send, b": keep-alive\n\n")
            has_begun = True

    async def _send(self, task: asyncio.Task[Answer], gone: asyncio.Task[None], send: Send, has_begun: bool) -> None:
        outcome = _outcome(task)
        if isinstance(outcome, ApiError):
            text = self._dialect.error_event(outcome) if has_begun else json.dumps(self._dialect.error(outcome))
            status, content = outcome.status, _JSON
        elif self._stream:
            status, content, text = 200, _EVENTS, "".join(self._dialect.events(outcome))
        else:
            status, content, text = 200, _JSON, json.dumps(self._dialect.write(outcome))
        if not has_begun:
            await _start(send, status, content, len(text))  # all ASCII: characters are bytes
        await _body(send, text.encode())
        await _body(send, b"", more=False)  # returns once the connection has taken the answer
        if isinstance(outcome, Answer) and not gone.done():
            self._exchanges.deliver(self._exchange)


def _outcome(task: asyncio.Task[Answer]) -> Answer | ApiError:
    if task.cancelled():
        return ApiError(404, "the session has ended")
    error = task.exception()
    return task.result() if error is None else api_error_of(error)


def api_error_of(error: BaseException) -> ApiError:
    """Convert the error of a call to the one that its client gets. Raises the exception itself if it is a bug."""
    match error:
        case ApiError():
            return error
        case ContextExceeded():
            return ApiError(400, str(error), "messages", "context_length_exceeded")
        case StepsExceeded():
            return ApiError(400, str(error), code="max_steps_exceeded")
        case DataError():
            return ApiError(400, str(error))
        case EngineError():
            return ApiError(503, f"the engine failed: {error}")
    raise error


def retry_after(status: int) -> dict[str, str]:
    """Return the header for errors that may pass."""
    return {"retry-after": "1"} if status in (429, 503) else {}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, status: int, content: str, length: int | None = None) -> None:
    headers = {"content-type": content, "cache-control": "no-store", **retry_after(status)}
    if length is not None:
        headers["content-length"] = str(length)
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def _body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
