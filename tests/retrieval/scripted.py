"""A server that answers as a test says, one request after another."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = tuple[int, dict[str, str], Any] | None
"""Status, headers and JSON; None: the connection is closed without an answer."""


def found(*contents: str) -> Answer:
    return 200, {}, {"result": [[{"document": {"contents": text}, "score": 1.0} for text in contents]]}


@dataclass
class Scripted:
    url: str = ""
    requests: list[Any] = field(default_factory=list)


@asynccontextmanager
async def scripted_server(answers: Sequence[Answer]) -> AsyncIterator[Scripted]:
    """Yield a server that gives these answers, and then the last one for ever."""
    server = Scripted()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                server.requests.append(json.loads(await reader.readexactly(length)))
                answer = answers[min(len(server.requests), len(answers)) - 1]
                if answer is None:
                    break
                status, headers, content = answer
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *map(": ".join, headers.items())]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/retrieve"
    async with listening:
        yield server
