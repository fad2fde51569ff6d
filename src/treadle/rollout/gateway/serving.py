"""A gateway on a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from treadle.rollout.gateway.address import GatewayConfig, listen, url_of
from treadle.rollout.gateway.app import make_app
from treadle.rollout.gateway.gateway import Gateway

_LOOPBACK = GatewayConfig()
_READY = 0.005  # seconds between two looks at whether the server listens
_CONNECTIONS = 16384  # a quarter of the files that `shared` allows; beyond it, uvicorn answers 503


class _Server(uvicorn.Server):
    """Leaves signals to the code that runs the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(
    gateway: Gateway, config: GatewayConfig = _LOOPBACK, listening: socket.socket | None = None
) -> AsyncIterator[str]:
    """Serve the gateway while the context lasts; yield the URL that agents are given, `http://127.0.0.1:54321`.

    config: by default a free port of the loopback interface. listening: a socket that is already open.
    Raises ConfigError if the address is not available.
    """
    with listening or listen(config) as listening:
        gateway.url = config.advertised_url or url_of(listening)
        server = _Server(
            uvicorn.Config(
                make_app(gateway),
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
        running = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            while not server.started and not running.done():
                await asyncio.sleep(_READY)
            yield gateway.url
        finally:
            await gateway.close()
            server.should_exit = True
            await running
