"""`python -m treadle.engines.child_worker FD`: the process of a `ChildProcess`, at the other end of its channel."""

from __future__ import annotations

import asyncio
import socket
import sys
import traceback
from contextlib import suppress
from functools import partial
from typing import Any

from treadle.core.errors import TreadleError
from treadle.core.processes import end_with_parent
from treadle.engines.child import Channel


class Calls:
    """Calls of an object's asynchronous methods; answers are sent as they are there."""

    def __init__(self, served: Any, channel: Channel) -> None:
        self._served, self._channel = served, channel
        self._running: dict[int, asyncio.Task[Any]] = {}

    def take(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Start a call, or without a method cancel it."""
        if not method:
            if number in self._running:
                self._running[number].cancel()
            return
        call = asyncio.get_running_loop().create_task(getattr(self._served, method)(*arguments))
        self._running[number] = call
        call.add_done_callback(partial(self._answer, number))

    def _answer(self, number: int, call: asyncio.Task[Any]) -> None:
        del self._running[number]
        if call.cancelled():
            return
        error = call.exception()
        if error is None:
            self._channel.send((number, call.result(), None))
        elif isinstance(error, TreadleError):
            self._channel.send((number, None, error))
        else:
            traceback.print_exception(error)
            self._channel.send((number, None, f"{type(error).__name__}: {error}"))


async def serve(end: socket.socket) -> None:
    """Answer calls until the channel closes. The first message makes the object."""
    channel = await Channel.open(end)
    with suppress(EOFError):
        make = await channel.receive()
        calls = Calls(make(), channel)
        while True:
            calls.take(*await channel.receive())


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
