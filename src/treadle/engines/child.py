"""Child processes on this machine that serve an object's methods.

ChildProcess.call(method, *arguments) --pickle--> serve: await object.method(*arguments)

`python -m treadle.engines.child FD` is such a process.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from subprocess import Popen
from typing import Any

from treadle.core.engine import ProcessId
from treadle.core.errors import PlacementError, TreadleError, WorkerLost
from treadle.core.processes import end_with_parent, exit_in_words, start_child

_MODULE = "treadle.engines.child"
_PATIENCE = 20.0  # seconds for a process that closed its channel to end
_TAIL = 15  # lines of the log that an error shows
_BUFFER = 2**20  # bytes read ahead


class Channel:
    """One end of a socket that carries Python objects. Both ends trust each other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_BUFFER))

    def send(self, message: Any) -> None:
        """Queue a message for the other end. Does nothing once the channel is closed."""
        if not self._writer.is_closing():
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._writer.writelines((len(data).to_bytes(8), data))

    async def receive(self) -> Any:
        """Return the next message. Raises EOFError once the other end is closed."""
        try:
            size = int.from_bytes(await self._reader.readexactly(8))
            return pickle.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the other end was closed") from error

    def close(self) -> None:
        self._writer.transport.abort()


class ChildProcess:
    """A process that makes an object and answers calls of its asynchronous methods (a `supervised.Worker`).

    name: for errors. make: creates the object there; picklable, and must not raise. log: file to which the process's
    output is appended.
    """

    def __init__(self, name: str, make: Callable[[], Any], log: Path) -> None:
        self.process: ProcessId | None = None
        self._name, self._make, self._log = name, make, log
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._ended = ""  # how, once it has
        self._child: Popen[bytes] | None = None
        self._channel: Channel
        self._listener: asyncio.Task[None]

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel = await Channel.open(ours)
            try:
                with self._log.open("ab") as output:
                    self._child = start_child(_MODULE, theirs, output)
            except OSError as error:
                self._channel.close()
                raise PlacementError(f"could not start {self._name}: {error}") from error
        self.process = ProcessId(socket.gethostname(), self._child.pid)
        self._listener = asyncio.get_running_loop().create_task(self._listen(self._child))
        self._channel.send(self._make)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the answer; cancelling this cancels the call.

        Raises Treadle's errors as they were raised there, PlacementError for any other exception, and WorkerLost.
        """
        if self._ended:
            raise WorkerLost(self._ended)
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._channel.send((number, method, arguments))
            return await answer
        except asyncio.CancelledError:
            self._channel.send((number, "", ()))
            raise
        finally:
            del self._calls[number]

    def post(self, method: str, *arguments: Any) -> None:
        self._channel.send((next(self._numbers), method, arguments))

    async def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            await asyncio.wait([self._listener])

    def tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
        return "\n".join([f"\nIts log {self._log} ends:", *lines])

    async def _listen(self, child: Popen[bytes]) -> None:
        """Deliver answers until the process ends; then fail the remaining calls."""
        with suppress(EOFError):
            while True:
                self._take(*await self._channel.receive())
        self._channel.close()
        self._ended = f"{self._name} ended with {exit_in_words(await _reap(child))}{self.tail()}"
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(WorkerLost(self._ended))

    def _take(self, number: int, value: Any, error: TreadleError | str | None) -> None:
        answer = self._calls.get(number)
        if answer is None or answer.done():  # cancelled, or posted
            return
        if error is None:
            answer.set_result(value)
        elif isinstance(error, str):
            answer.set_exception(PlacementError(f"{self._name} failed with {error}{self.tail()}"))
        else:
            answer.set_exception(error)


async def _reap(child: Popen[bytes]) -> int:
    """Wait for a process to exit, killing it after `_PATIENCE` seconds; return its exit code."""
    assert child.stdin is not None
    child.stdin.close()
    ending = asyncio.ensure_future(asyncio.to_thread(child.wait))
    if not (await asyncio.wait([ending], timeout=_PATIENCE))[0]:
        child.kill()
    return await ending


class Calls:
    """Runs calls of an object's asynchronous methods and sends each answer when it is ready."""

    def __init__(self, served: Any, channel: Channel) -> None:
        self._served, self._channel = served, channel
        self._running: dict[int, asyncio.Task[Any]] = {}

    def take(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Start a call; an empty method cancels it."""
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
