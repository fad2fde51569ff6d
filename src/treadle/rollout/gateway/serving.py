"""A gateway on a socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from treadle.rollout.gateway.address import GatewayConfig, listen, url_of
from treadle.rollout.gateway.app import make_app
from treadle.rollout.gateway.gateway import Gateway

_LOOPBACK = GatewayConfig()
_READY = 0.005  # seconds between two looks at whether the server listens
_TICKS = 10  # looks at a connection within its client's patience
_SLOWEST = 2**16  # bytes a second
_LATE = "the request was not sent to its end: of its body, nothing or next to nothing came for too long"


class _Server(uvicorn.Server):
    """Leaves signals to the code that runs the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """Is closed when its client stops sending in the middle of a request.

    A client may be silent for `patience` seconds in all; bytes that arrive earn that time back, at `_SLOWEST` a second.
    Between two requests (uvicorn's keep-alive sees to those), and while the gateway does not read on, no time counts.
    """

    def __init__(self, *args: Any, patience: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._left = self._patience = patience
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._tick(0.0)

    def data_received(self, data: bytes) -> None:
        self._left = min(self._patience, self._left + len(data) / _SLOWEST)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _tick(self, seconds: float) -> None:
        """Count time in small ticks: of a time for which the event loop was blocked, only one tick counts."""
        self._left = self._left - seconds if self._client_owes() else self._patience
        if self._left <= 0:
            self._close_late()
        else:
            pause = self._patience / _TICKS
            self._timer = self.loop.call_later(pause, self._tick, pause)

    def _client_owes(self) -> bool:
        if self.conn.their_state is h11.SEND_BODY:
            return not (self.flow.read_paused or self.cycle.waiting_for_100_continue)
        return self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None

    def _close_late(self) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE:  # the headers came, and nothing has been answered yet
            body = json.dumps({"error": {"type": "invalid_request_error", "message": _LATE}}).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=408, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.cycle.disconnected = True  # whatever the gateway still says
        self.transport.close()


@asynccontextmanager
async def serving(
    gateway: Gateway, config: GatewayConfig = _LOOPBACK, listening: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve the gateway while the context lasts; yield the URL that agents are given, `http://127.0.0.1:54321`.

    config: by default a free port of the loopback interface. listening: the socket, where it was opened earlier.
    On leaving it is closed and every session detached. Raises ConfigError for an address that cannot be had.
    """
    with listening or listen(config) as listening:
        gateway.url = config.advertised_url or url_of(listening)
        server = _Server(
            uvicorn.Config(
                make_app(gateway),
                http=partial(_Connection, patience=gateway.patience),  # type: ignore[arg-type]
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,  # paths hold secrets
                server_header=False,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=2,
            )
        )
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            while not server.started and not running.done():
                await asyncio.sleep(_READY)
            yield gateway.url
        finally:
            await gateway.close()
            server.should_exit = True
            await running
