"""Child processes in Treadle's Python on this machine that never outlive this one.

ChildProcess.call(method, *arguments) --pickle--> serve: await object.method(*arguments)

`python -m treadle.workers.child FD` runs such a process.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from typing import IO, Any

from treadle.core.engine import ProcessId
from treadle.core.errors import PlacementError, TreadleError, WorkerLost
from treadle.workers.calls import Calls, Service

_MODULE = "treadle.workers.child"
_PATIENCE = 20.0  # seconds for a process to end after closing its channel
_GRACE = 5.0  # seconds to exit after the parent has ended
_TAIL, _READ = 15, 2**16  # lines of its output shown in an error, and bytes searched for them
_BUFFER = 2**20  # bytes read ahead


class Pickled:
    """An object pickled once, however often it is sent; it arrives as the object itself."""

    def __init__(self, value: Any) -> None:
        self._data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)


class Channel:
    """One end of a socket that carries Python objects. Both ends trust each other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_BUFFER))

    def send(self, message: Any) -> None:
        """Queue a message for the other end. No-op once the channel is closed."""
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
    """A process that creates an object and answers calls of its asynchronous methods (a `Worker`).

    name: for errors. make: creates the object in the process; picklable, and must not raise. log: file to append the
    process's output to; default: an unnamed one.
    """

    def __init__(self, name: str, make: Callable[[], Any], log: Path | None = None) -> None:
        self.process: ProcessId | None = None
        self._name, self._make, self._log = name, make, log
        self._ended = ""  # description of the end, once it has ended
        self._output: IO[bytes]
        self._child: Popen[bytes] | None = None
        self._channel: Channel
        self._calls: Calls
        self._listener: asyncio.Task[None]

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel = await Channel.open(ours)
            self._calls = Calls(self._channel.send, self._failure)
            try:
                self._output = tempfile.TemporaryFile() if self._log is None else self._log.open("a+b")  # noqa: SIM115
                self._child = _start(theirs, self._output)
            except OSError as error:
                # No such directory, or out of processes.
                self._channel.close()
                raise PlacementError(f"could not start {self._name}: {error}") from error
        self.process = ProcessId(socket.gethostname(), self._child.pid)
        self._listener = asyncio.get_running_loop().create_task(self._listen(self._child))
        self._channel.send(self._make)

    async def call(self, method: str, *arguments: Any) -> Any:
        if self._ended:
            raise WorkerLost(self._ended)
        return await self._calls.call(method, *arguments)

    def post(self, method: str, *arguments: Any) -> None:
        self._calls.post(method, *arguments)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    async def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            await asyncio.wait([self._listener])
            self._output.close()

    def tail(self) -> str:
        fd = self._output.fileno()
        size = os.fstat(fd).st_size
        lines = os.pread(fd, _READ, max(0, size - _READ)).decode(errors="replace").splitlines()[-_TAIL:]
        if self._log is not None:
            return "\n".join([f"\nIts log {self._log} ends:", *lines])
        return "\n".join(["; its output ends:", *lines]) if lines else ""

    async def _listen(self, child: Popen[bytes]) -> None:
        """Deliver answers until the process ends; then fail the remaining calls."""
        with suppress(EOFError):
            while True:
                self._calls.take(*await self._channel.receive())
        self._channel.close()
        self._ended = f"{self._name} ended with {_exit_in_words(await _reap(child))}{self.tail()}"
        self._calls.fail(WorkerLost(self._ended))

    def _failure(self, error: str) -> TreadleError:
        return PlacementError(f"{self._name} failed with {error}{self.tail()}")


def _start(channel: socket.socket, output: IO[bytes]) -> Popen[bytes]:
    """Start a child that inherits the channel. Raises OSError.

    output: file for its standard output and errors. The child runs in its own session, so that Ctrl-C reaches only this
    process, which may need the child to finish. Its standard input is an empty pipe that closes when this process ends,
    however that happens (`_end_with_parent`). `__main__` is not imported again, so scripts need no guard.
    """
    return Popen(
        [sys.executable, "-P", "-m", _MODULE, str(channel.fileno())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        stdin=PIPE,
        stdout=output,
        stderr=STDOUT,
        pass_fds=[channel.fileno()],
        start_new_session=True,
    )


async def _reap(child: Popen[bytes]) -> int:
    """Wait for a process to exit, killing it after `_PATIENCE` seconds; return its exit code."""
    assert child.stdin is not None
    child.stdin.close()
    ending = asyncio.ensure_future(asyncio.to_thread(child.wait))
    if not (await asyncio.wait([ending], timeout=_PATIENCE))[0]:
        child.kill()
    return await ending


def _exit_in_words(code: int) -> str:
    return f"code {code}" + (f" ({signal.strsignal(-code)})" if code < 0 else "")


async def serve(end: socket.socket) -> None:
    """Answer calls until the channel closes. The first message creates the object."""
    channel = await Channel.open(end)
    with suppress(EOFError):
        make = await channel.receive()
        service = Service(make(), channel.send, described)
        while True:
            service.take(*await channel.receive())


def described(error: BaseException) -> TreadleError | str | None:
    """Return the error that a caller gets, as it is or in words; None for a cancelled call."""
    if isinstance(error, TreadleError):
        return error
    if not isinstance(error, Exception):
        return None
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def _end_with_parent() -> None:
    """Kill this process if it outlives its parent by more than `_GRACE` seconds, however the parent dies.

    The parent holds the other end of standard input, which closes when it ends.
    """

    def watch() -> None:
        while os.read(0, 1024):
            pass
        time.sleep(_GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    _end_with_parent()
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
    sys.stdout.flush()
    # Libraries would wait for processes that have also ended.
    os._exit(0)


if __name__ == "__main__":
    main()
