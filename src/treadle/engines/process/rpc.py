"""Starting a process that answers calls, exchanging messages with it, and noticing that it has ended."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

from treadle.core.child_process import exit_in_words, start_child
from treadle.core.errors import EngineError
from treadle.engines.process.protocol import LONGEST_LINE, Message, Outbox, decode

_TAIL = 15  # lines of the log that an error shows
_PATIENCE = 20.0  # seconds for a process to end by itself
_SILENCES = 4  # unanswered pings in a row after which a process is killed: it may be stopped


class Link:
    """Holds a process that answers calls, and the channel to it (`process.protocol`).

    ended: once the process has ended, why; from then on every call fails with that. answered: how many calls it has
    answered. exit_code: in words, once the process has ended.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        log: Path,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.answered, self.exit_code, self.log = 0, "", log
        self._process, self._reader, self._writer = process, reader, writer
        self._outbox = Outbox(writer)
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Message]] = {}
        self._unanswered, self._killed = 0, ""  # pings since its last message; why it was killed, in words
        self._listener = loop.create_task(self._listen())

    @classmethod
    async def start(cls, module: str, log: Path) -> Link:
        """Run a module as `start_child` does, with a channel to it. log: where its output is appended."""
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
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def post(self, message: Message) -> None:
        """Send a message that is not answered, after everything sent before."""
        if not self.ended.done():
            self._outbox.post(message)

    def call(self, message: Message) -> asyncio.Future[Message]:
        """Send a message and return its answer. Cancelling the future cancels the call; it fails with EngineError."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        if self.ended.done():
            answer.set_exception(EngineError(self.ended.result()))
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
        self._process.kill()  # works on one that is stopped, too

    def tail(self) -> str:
        """Return the last lines of the log, with an introduction."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"its log {self.log} ends:\n" + "\n".join(lines[-_TAIL:])

    async def close(self, why: str) -> None:
        """End the process; calls that are not answered yet fail with `why`. Idempotent."""
        self._end(why)
        self._writer.transport.abort()  # without waiting for it to read
        await asyncio.wait([self._listener])

    def _settled(self, number: int, answer: asyncio.Future[Message]) -> None:
        del self._calls[number]
        if answer.cancelled():
            self.post({"do": "cancel", "call": number})

    async def _listen(self) -> None:
        with suppress(ConnectionError):  # the process died with something unread
            async for line in self._reader:
                for message in decode(line):
                    self._take(message)
        self.exit_code = exit_in_words(await self._reap()) + self._killed
        self._end(f"the engine's process ended with {self.exit_code}; {self.tail()}")

    def _take(self, message: Message) -> None:
        self._unanswered = 0
        if "call" not in message:  # it answers a ping
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
                answer.set_exception(EngineError(why))

    async def _reap(self) -> int:
        """Close standard input and return the exit code; kill a process that does not end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return await asyncio.to_thread(self._process.wait, _PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return await asyncio.to_thread(self._process.wait)
