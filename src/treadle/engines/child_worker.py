"""`python -m treadle.engines.child_worker FD`: the process of a `ChildProcess`, at the other end of its channel."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from functools import partial
from inspect import isasyncgen
from multiprocessing.connection import Connection
from typing import Any

from treadle.core.child_process import end_with_parent
from treadle.core.errors import PlacementError, TreadleError
from treadle.engines.child import End


class Service:
    """Answers calls with an object that the first message makes."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._calls: dict[int, asyncio.Task[Any]] = {}
        self._object: Any = None
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        threading.Thread(target=self._read, daemon=True).start()

    async def run(self) -> None:
        """Answer until the channel closes."""
        await self._closed.wait()

    def _read(self) -> None:
        """Read in a thread, so that neither end ever waits for the other one to read."""
        while True:
            try:
                message = self._channel.recv()
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._closed.set)
                return
            self._loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: Any) -> None:
        if self._object is None:
            self._object = message()
            return
        number, method, arguments = message
        if not method:
            if number in self._calls:
                self._calls[number].cancel()
            return
        task = self._loop.create_task(self._work(number, getattr(self._object, method)(*arguments)))
        self._calls[number] = task
        task.add_done_callback(partial(self._finished, number))

    async def _work(self, number: int, work: Any) -> Any:
        """Return what a coroutine returns; of an asynchronous generator, send each value, and raise `End`."""
        if not isasyncgen(work):
            return await work
        async for value in work:
            self._channel.send((number, value, None))
        raise End

    def _finished(self, number: int, task: asyncio.Task[Any]) -> None:
        self._calls.pop(number, None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, TreadleError):
            traceback.print_exception(error)
            error = PlacementError(f"it failed with {type(error).__name__}: {error}")
        value = task.result() if error is None else None
        if number >= 0:
            self._channel.send((number, value, error))


async def _serve(channel: Connection) -> None:
    await Service(channel).run()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(_serve(Connection(int(sys.argv[1]))))
