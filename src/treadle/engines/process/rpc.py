"""Exchanging messages with a process that answers calls, and noticing that it has ended.

Link: calls by number, pings -> Channel: a socket to a child of this process, or whatever else reaches a process
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from treadle.core.child_process import exit_in_words, start_child
from treadle.core.errors import EngineError
from treadle.core.status import ProcessId
from treadle.engines.process.protocol import LONGEST_LINE, Message, Outbox, decode

_TAIL = 15  # lines of the log that an error shows
_PATIENCE = 20.0  # seconds for a process to end by itself
_SILENCES = 4  # unanswered pings in a row after which a process is killed: it may be stopped


class EngineEnded(EngineError):
    """Says that the process of an engine has ended before it answered; the call may be made on another one."""


class Channel(Protocol):
    """Carries messages to a process and back, in order."""

    @property
    def process(self) -> ProcessId:
        """Return which process it is."""
        ...

    @property
    def log(self) -> str:
        """Return where the process writes its output."""
        ...

    @property
    def route(self) -> Any:
        """Return what reaches the process from other ones, without this one; None if nothing does."""
        ...

    def post(self, message: Message) -> None:
        """Send a message, after everything posted before."""
        ...

    def received(self) -> AsyncIterator[Sequence[Message]]:
        """Yield the messages that come, those of one turn of the other event loop together, until there are no more."""
        ...

    def kill(self) -> None:
        """End the process at once, also one that is stopped."""
        ...

    def abort(self) -> None:
        """Close this end, without waiting for what was posted to be read."""
        ...

    async def reap(self) -> str:
        """Return, in words, how the process ended; end it if it does not by itself."""
        ...

    def tail(self) -> str:
        """Return the end of its output, with an introduction."""
        ...

    def note(self, line: str) -> None:
        """Add a line to its output."""
        ...


class Link:
    """Holds the channel to a process that answers calls (`process.protocol`).

    ended: once the process has ended, why; from then on every call fails with that. answered: how many calls it has
    answered. exit_code: in words, once the process has ended. said: its last answer to a ping.
    """

    def __init__(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.answered, self.exit_code = 0, ""
        self.said: Message = {}
        self.channel = channel
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Message]] = {}
        self._unanswered, self._killed = 0, ""  # pings since its last message; why it was killed, in words
        self._listener = loop.create_task(self._listen())

    @classmethod
    async def start(cls, module: str, log: Path) -> Link:
        """Run a module as `start_child` does, with a channel to it. log: where its output is appended."""
        return cls(await ChildChannel.start(module, log))

    def post(self, message: Message) -> None:
        """Send a message that is not answered, after everything sent before."""
        if not self.ended.done():
            self.channel.post(message)

    def call(self, message: Message) -> asyncio.Future[Message]:
        """Send a message and return its answer. Cancelling the future cancels the call; it fails with EngineError."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        if self.ended.done():
            answer.set_exception(EngineEnded(self.ended.result()))
            return answer
        self._calls[number] = answer
        answer.add_done_callback(partial(self._settled, number))
        self.post({**message, "call": number})
        return answer

    async def watch(self, silence: float) -> None:
        """Ping the process until it ends; kill it if it sends nothing for `silence` seconds."""
        while self._unanswered < _SILENCES:
            self._unanswered += 1
            self.post({"do": "ping"})
            if (await asyncio.wait({self.ended}, timeout=silence / _SILENCES))[0]:
                return
        self._killed = f" after {silence:g} s without an answer"
        self.channel.kill()

    async def close(self, why: str) -> None:
        """End the process; calls that are not answered yet fail with `why`. Idempotent."""
        self._end(why)
        self.channel.abort()
        await asyncio.wait([self._listener])

    def _settled(self, number: int, answer: asyncio.Future[Message]) -> None:
        del self._calls[number]
        if answer.cancelled():
            self.post({"do": "cancel", "call": number})

    async def _listen(self) -> None:
        async for messages in self.channel.received():
            for message in messages:
                self._take(message)
        self.exit_code = await self.channel.reap() + self._killed
        self._end(f"the engine's process ended with {self.exit_code}; {self.channel.tail()}")

    def _take(self, message: Message) -> None:
        self._unanswered = 0
        if "call" not in message:  # it answers a ping
            self.said = message
            return
        self.answered += 1
        answer = self._calls.get(message["call"])
        if answer is None or answer.done():  # cancelled
            return
        if "error" in message:
            answer.set_exception(EngineError(message["error"]))
        else:
            answer.set_result(message)

    def _end(self, why: str) -> None:
        if self.ended.done():
            return
        self.ended.set_result(why)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineEnded(why))


class ChildChannel:
    """Is a socket to a child of this process (a `Channel`). Made by `start`."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._log, self._reader, self._writer = process, log, reader, writer
        self._outbox = Outbox(writer)

    @classmethod
    async def start(cls, module: str, log: Path) -> ChildChannel:
        """Run a module as `start_child` does. log: where its output is appended. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LONGEST_LINE)
            try:  # nothing is awaited from here on: a cancelled caller leaves no process
                process = start_child(module, theirs, output)
            except OSError:
                writer.transport.abort()
                raise
        return cls(process, log, reader, writer)

    @property
    def process(self) -> ProcessId:
        return ProcessId(socket.gethostname(), self._process.pid)

    @property
    def log(self) -> str:
        return str(self._log)

    @property
    def route(self) -> None:
        return None

    def post(self, message: Message) -> None:
        self._outbox.post(message)

    async def received(self) -> AsyncIterator[Sequence[Message]]:
        with suppress(ConnectionError):  # the process died with something unread
            async for line in self._reader:
                yield decode(line)

    def kill(self) -> None:
        self._process.kill()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def reap(self) -> str:
        """Close standard input and return the exit code in words; kill a process that does not end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        ending = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        if not (await asyncio.wait({ending}, timeout=_PATIENCE))[0]:
            self._process.kill()
        return exit_in_words(await ending)

    def tail(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"its log {self._log} ends:\n" + "\n".join(lines[-_TAIL:])

    def note(self, line: str) -> None:
        with suppress(OSError), self._log.open("a", encoding="utf-8") as log:  # a full disk
            log.write(f"{line}\n")
