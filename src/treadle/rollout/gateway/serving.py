"""A gateway on a socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from treadle.rollout.gateway.app import make_app
from treadle.rollout.gateway.gateway import Gateway

_READY = 0.005  # seconds between two looks at whether the server listens


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A socket that listens there. Port 0: any free one. Raises OSError for an address that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it: saves 40 ms an answer
    return listening


@asynccontextmanager
async def serving(gateway: Gateway, listening: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve the gateway while the context lasts; gives its URL, `http://127.0.0.1:54321`.

    listening: by default on a free port of the loopback interface. On leaving it is closed and every session detached.
    """
    with listening or listen() as listening:
        host, port = listening.getsockname()[:2]
        gateway.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = _Server(
            uvicorn.Config(
                make_app(gateway),
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
