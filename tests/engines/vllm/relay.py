"""Stands in for a second vLLM server: passes connections on to one that runs.

`python relay.py TARGET ... --port PORT ...`, with the arguments of a server; TARGET is the port of the running one.
"""

import asyncio
import sys
from contextlib import suppress

HOST = "127.0.0.1"


class Relay:
    """`requests`: what clients sent, one item a connection, which is one call."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.requests: list[bytearray] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, port: int = 0) -> str:
        self._listening = await asyncio.start_server(self._accept, HOST, port)
        return f"http://{HOST}:{self._listening.sockets[0].getsockname()[1]}"

    def kill(self) -> None:
        """Break all connections and take no more."""
        self._listening.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = bytearray()
        self.requests.append(request)
        server_reader, server_writer = await asyncio.open_connection(HOST, self.target)
        self._writers |= {writer, server_writer}
        await asyncio.gather(_pass(reader, server_writer, request), _pass(server_reader, writer, bytearray()))
        self._writers -= {writer, server_writer}


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: bytearray) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            seen += data
            writer.write(data)
            await writer.drain()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def main(target: int, port: int) -> None:
    await Relay(target).listen(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[sys.argv.index("--port") + 1])))
