"""`WorkerProcess`: one process that plays attempts (`child`), from its start to its end."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.integrations.worker import child
from treadle.integrations.worker.config import WorkerConfig
from treadle.rollout.agents.command import SupervisedProgram, inherited_variables

Json = dict[str, Any]

_ENVELOPE = 2**20  # bytes of an answer that are not its result
_OTHER_PYTHON = ("PYTHONPATH", "LD_LIBRARY_PATH")  # of the run's variables: they are meant for its own Python
_PLACE = re.compile(r'most recent call first\):\n  File "(.+)", line (\d+) in (\S+)')  # as faulthandler writes it


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker process, seconds and bytes; no run needs others.

    start: until the library is imported; a process that dies meanwhile is noticed at once. heartbeat: between signs of
    life. silence: without one, after which a process is killed and replaced. cleanup: for an attempt that is cancelled,
    and for all when the run ends. output: of one attempt's result, as JSON. attempts: at once; further ones wait.
    """

    start: float = 600.0
    heartbeat: float = 1.0
    silence: float = 60.0
    cleanup: float = 30.0
    output: int = 16 * 2**20
    attempts: int = 256


@dataclass(frozen=True)
class WorkerProgram:
    """Program of worker processes.

    name: of the library, for messages. handler: file that calls the library (`treadle.integrations.worker`). python:
    interpreter that has it. remedy: how to install it, for errors. options: argument of the handler's `start`.
    cause: of failures that the handler raises. lost_cause: of failures when a process dies. limits: of each process.
    """

    name: str
    handler: Path
    python: str
    remedy: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    cause: Cause = Cause.ENVIRONMENT
    lost_cause: Cause = Cause.ENVIRONMENT
    limits: WorkerLimits = field(default_factory=WorkerLimits)


@dataclass(frozen=True, slots=True)
class Ready:
    """First message of a process: `Ready(4711, {"harbor": "0.24.0"}, {})`. info: result of the handler's `start`."""

    pid: int
    versions: dict[str, str]
    info: Json


class WorkerProcess:
    """One worker process. Create it with `start`; call `close` when done.

    ready: its first message. playing: attempts in progress at its last heartbeat; None before it.
    Invariant: each call ends, at the latest when the process does; `is_usable` is false from then on, and once an
    attempt could not be cancelled.
    """

    def __init__(
        self,
        program: WorkerProgram,
        config: WorkerConfig,
        process: SupervisedProgram,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._program, self._limits, self._config, self._process = program, program.limits, config, process
        self._reader, self._writer = streams
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Json]] = {}
        self._reading: asyncio.Task[None] | None = None
        self.is_usable = True
        self.ready = Ready(0, {}, {})
        self.playing: int | None = None

    @classmethod
    async def start(cls, program: WorkerProgram, config: WorkerConfig) -> Self:
        """Start a process and wait until the library is imported. Raises ConfigError where that fails."""
        if shutil.which(program.python) is None:
            raise ConfigError(f"{program.name}: {program.python!r} is not an interpreter; {program.remedy}")
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_connection(sock=ours, limit=program.limits.output + _ENVELOPE)
            try:
                process = await SupervisedProgram.start(
                    [program.python, str(Path(child.__file__)), str(program.handler.absolute())],
                    _environment(config),
                    theirs.fileno(),
                    grace=program.limits.cleanup,
                )
            except BaseException:
                streams[1].close()
                raise
        self = cls(program, config, process, streams)
        try:
            self.ready = await self._started()
        except BaseException:
            await self._end()
            raise
        self._reading = asyncio.create_task(self._read())
        return self

    async def call(self, payload: Json, stop: asyncio.Event | None = None) -> Json:
        """Play one attempt and return its result. Raises TrajectoryFailure.

        stop: once it is set, the attempt is asked to come to its end. Cancelling the call cancels the attempt, and
        waits for at most `limits.cleanup` seconds until it is over.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # asyncio need not log it
        self._pending[number] = answer
        self._send({"run": number, "payload": payload})
        try:
            if stop is not None and not await _done_first(answer, stop):
                self._send({"stop": number})
            await asyncio.wait({answer})
        except asyncio.CancelledError:
            await self._cancel(number, answer)
            raise
        return answer.result()

    async def drain(self) -> None:
        """Let the attempts end by themselves, or by `close`; then close."""
        self.is_usable = False
        while self._pending:
            await asyncio.wait(list(self._pending.values()))
        await self.close()

    async def close(self) -> None:
        """Cancel all attempts, give them `limits.cleanup` seconds to clean up, and end the process."""
        self.is_usable = False
        if self._reading is not None and not self._reading.done():
            if self._writer.can_write_eof() and not self._writer.is_closing():
                self._writer.write_eof()  # the process cancels all attempts and ends
            await asyncio.wait({self._reading}, timeout=self._limits.cleanup)
            self._reading.cancel()
            await asyncio.wait({self._reading})
        await self._end()
        self._fail_all(f"the {self._program.name} worker was closed")

    # --- starting ------------------------------------------------------------------------------------------------

    async def _started(self) -> Ready:
        settings = {
            "heartbeat": self._limits.heartbeat,
            "patience": self._limits.silence,
            "memory_limit": self._config.memory_limit,
            "output_limit": self._limits.output,
            "options": dict(self._program.options),
        }
        self._send({"start": settings})
        try:
            async with asyncio.timeout(self._limits.start):
                line = await self._line()
        except TimeoutError:
            raise ConfigError(
                f"{self._where()}: not ready after {self._limits.start:g} s; {self._program.remedy}"
            ) from None
        if not line:
            raise ConfigError(f"{self._where()}: {await self._death()}; {self._program.remedy}")
        message = json.loads(line)
        if "failed" in message:
            raise ConfigError(f"{self._where()}: {message['failed']}; {self._program.remedy}")
        return Ready(**message["ready"])

    def _where(self) -> str:
        return f"{self._program.name} in {self._program.python}"

    # --- talking to it -------------------------------------------------------------------------------------------

    def _send(self, message: Json) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _line(self) -> bytes:
        """Return the next line of the process; nothing if it has ended."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):  # gone, or a line longer than any that it may send
            return b""
        return line if line.endswith(b"\n") else b""

    async def _read(self) -> None:
        """Read answers and heartbeats until the process ends, or is silent for `limits.silence` seconds."""
        blocked, broken = False, ""
        try:
            while line := await self._line_in_time():
                self._take(json.loads(line))
        except TimeoutError:
            blocked = True
        except (ValueError, RecursionError) as error:
            broken = f"wrote a line that cannot be read ({error}) and "
        self.is_usable = False
        await self._process.stop()
        self._fail_all(f"the {self._program.name} worker {broken}{await self._death(blocked)}")

    async def _line_in_time(self) -> bytes:
        try:
            async with asyncio.timeout(self._limits.silence):
                return await self._line()
        except TimeoutError:  # it may have been this event loop that was blocked: what has come meanwhile is read first
            async with asyncio.timeout(self._limits.heartbeat):
                return await self._line()

    def _take(self, message: Json) -> None:
        if "heartbeat" in message:
            self.playing = message["heartbeat"]
            return
        number = message["id"]
        answer = self._pending.pop(number, None)
        if answer is None:  # nobody waits for it any more
            return
        if "error" not in message:
            answer.set_result(message["result"])
            return
        error = message["error"]
        if error["type"] == MemoryError.__name__:  # little is left for the others: they end, and a new process begins
            self.is_usable = False
        answer.set_exception(TrajectoryFailure(self._program.cause, error["message"], error["traceback"]))

    async def _cancel(self, number: int, answer: asyncio.Future[Json]) -> None:
        if answer.done():
            return
        self._send({"cancel": number})
        try:
            await asyncio.wait({answer}, timeout=self._limits.cleanup)
        finally:
            if self._pending.pop(number, None) is not None:  # it goes on, or so it seems
                self.is_usable = False

    # --- its end -------------------------------------------------------------------------------------------------

    async def _death(self, blocked: bool = False) -> str:
        """Wait for the end of the process; return how it ended, in words. blocked: killed for its silence."""
        result = await self._process.result()
        if result is None:
            return "was killed together with its supervisor"
        if "error" in result:
            return f"cannot be run: {result['error']}"
        if blocked:
            places = _PLACE.findall(result["stderr"])  # the main thread is the last one
            where = ", in {2}, {0}:{1}".format(*places[-1]) if places else ""
            return f"was killed: it gave no sign of life for {self._limits.silence:g} s{where}"
        last = (result["stderr"].strip() or result["stdout"].strip()).rpartition("\n")[2]
        status = result["status"]
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return how + (f": {last[-500:]}" if last else "")

    async def _end(self) -> None:
        self._writer.close()
        await self._process.stop()

    def _fail_all(self, why: str) -> None:
        for answer in self._pending.values():
            answer.set_exception(TrajectoryFailure(self._program.lost_cause, why))
        self._pending.clear()


def _environment(config: WorkerConfig) -> dict[str, str]:
    inherited = inherited_variables(config.inherit)
    mine = {name: value for name, value in inherited.items() if name not in _OTHER_PYTHON or name in config.inherit}
    return {**mine, "PYTHONUNBUFFERED": "1", **config.environment}


async def _done_first(answer: asyncio.Future[Json], stop: asyncio.Event) -> bool:
    """Wait for either; return whether the answer is there."""
    stopping = asyncio.ensure_future(stop.wait())
    waited: set[asyncio.Future[Any]] = {answer, stopping}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    return answer.done()
