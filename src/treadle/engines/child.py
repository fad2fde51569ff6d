"""Processes of this machine that answer calls of an object's methods.

ChildProcess.call(method, *arguments) --pickle--> child_worker: await object.method(*arguments)
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from treadle.core.child_process import exit_in_words, start_child
from treadle.core.errors import PlacementError, TreadleError, WorkerLost
from treadle.core.status import ProcessId

_MODULE = "treadle.engines.child_worker"
_PATIENCE = 20.0  # seconds for a process that closed its channel to end
_TAIL = 15  # lines of the log that an error shows


class End(TreadleError):
    """An asynchronous generator has yielded all."""


class ChildProcess:
    """A process that makes an object and answers calls of its methods (a `supervised.Worker`).

    make: makes the object there; a class or a function of a module, which does not fail. log: the file that the
    process's output is appended to.
    """

    def __init__(self, name: str, make: Callable[[], Any], log: Path) -> None:
        """Start the process. name: in errors. Raises PlacementError."""
        self._name, self._log = name, log
        self._loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Queue[tuple[Any, TreadleError | None]]] = {}
        self._numbers = count()
        self._ended: asyncio.Task[str] | None = None
        ours, theirs = socket.socketpair()
        try:
            with theirs, log.open("ab") as output:
                self._process = start_child(_MODULE, theirs, output)
        except OSError as error:
            ours.close()
            raise PlacementError(f"could not start {name}: {error}") from error
        self.process = ProcessId(socket.gethostname(), self._process.pid)
        self._channel = Connection(ours.detach())
        self._loop.add_reader(self._channel.fileno(), self._receive)
        self._send(make)

    async def open(self) -> None:
        """Return at once: the process runs."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the answer; cancelling this cancels the call.

        Raises Treadle's errors as they were raised there, PlacementError for any other exception, and WorkerLost.
        """
        answers = self.stream(method, *arguments)
        try:
            return await anext(answers)
        finally:
            await answers.aclose()

    async def stream(self, method: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Yield what an asynchronous generator yields there. Raises as `call`."""
        if self._ended is not None:
            raise WorkerLost(await asyncio.shield(self._ended) + self.tail())
        number = next(self._numbers)
        answers = self._calls[number] = asyncio.Queue()
        self._send((number, method, arguments))
        over = False
        try:
            while True:
                value, error = await answers.get()
                over = error is not None
                if isinstance(error, End):
                    return
                if error is not None:
                    raise error
                yield value
        finally:
            del self._calls[number]
            if not over:
                self._send((number, "", ()))

    def post(self, method: str, *arguments: Any) -> None:
        """Call a method whose answer nobody waits for."""
        self._send((-1, method, arguments))

    async def close(self) -> None:
        """End the process at once. Idempotent."""
        self._process.kill()
        if self._ended is None:
            self._hang_up()
        assert self._ended is not None
        await asyncio.wait([self._ended])

    def tail(self) -> str:
        """Return the end of its log, to end an error with."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
        return "\n".join([f"; its log {self._log} ends:", *lines])

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # it has ended, which `_receive` finds
            if self._ended is None:
                self._channel.send(message)

    def _receive(self) -> None:
        try:
            number, value, error = self._channel.recv()
        except (EOFError, OSError):
            self._hang_up()
            return
        if number in self._calls:  # else cancelled
            self._calls[number].put_nowait((value, error))

    def _hang_up(self) -> None:
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        self._ended = self._loop.create_task(self._reap())

    async def _reap(self) -> str:
        """Wait for the process to end, which it may not do by itself; fail the calls that it has not answered."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        ending = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        if not (await asyncio.wait([ending], timeout=_PATIENCE))[0]:
            self._process.kill()
        how = f"{self._name} ended with {exit_in_words(await ending)}"
        for answers in self._calls.values():
            answers.put_nowait((None, WorkerLost(how + self.tail())))
        return how
