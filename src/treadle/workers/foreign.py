"""`WorkerPool`: libraries that need their own Python, in a few processes that play many attempts each.

    pool = WorkerPool(WorkerProgram("Harbor", handler=Path("trials.py"), python="…/bin/python", remedy="make one: …"))
    async with pool:                                        # starts the processes; ConfigError if that fails
        answer = await pool.call({"task": "hello"})         # cancelling the call cancels the attempt in the process

    Treadle's Python                                        the library's Python
    WorkerPool ── WorkerProcess ── reaper.py ──────> foreign_child.py ── handler file
                       └──────────── socket, JSON lines ────────┘

The **handler file** imports the library and nothing of Treadle (modules beside it and in the run's directory are
importable). It has:

    async def run(payload: dict, stop: asyncio.Event) -> dict     plays one attempt; many run concurrently on one loop
    async def start(options: dict) -> dict                        optional, awaited once, before the first attempt; its
                                                                  errors become a ConfigError of the pool's start, its
                                                                  result is `pool.ready.info`
    async def close() -> None                                     optional, awaited once after the last attempt
    def versions() -> dict[str, str]                              optional: library versions, for `pool.ready.versions`

`stop` is set when the caller asks the attempt to end early but still give a result; a cancelled attempt gets asyncio's
CancelledError, has `limits.cleanup` seconds to clean up, and returns nothing.

Possible failures, and their effect on the caller of `pool.call`:

    the handler raises, exits, or allocates too much    TrajectoryFailure(program.cause), with its traceback
    it returns no JSON object, or too much of it        the same
    the process dies, is killed, or its event loop      TrajectoryFailure(program.lost_cause) for all its attempts; the
    is blocked for `limits.silence` seconds             next call starts another one, and other processes continue

Output of handler and library goes to a log, and errors show its end. Nothing started by a process outlives it, even if
the run or the process is killed (`workers.program`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from pydantic import Field

from treadle.core.config import Config, build
from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.workers.calls import Calls
from treadle.workers.program import Program, how_it_ended, inherited_variables

Json = dict[str, Any]

_CHILD = Path(__file__).with_name("foreign_child.py")
_ENVELOPE = 2**20  # bytes of an answer besides its result
_OTHER_PYTHON = ("PYTHONPATH", "LD_LIBRARY_PATH")  # variables meant only for the run's own Python
_PLACE = re.compile(r'most recent call first\):\n  File "(.+)", line (\d+) in (\S+)')  # format of faulthandler


class WorkerConfig(Config):
    """Configures the processes that run a library in its own Python."""

    processes: int = Field(1, ge=1, description="number of processes, each of which imports the library once")
    memory_limit: int = Field(
        8 * 2**30, ge=2**26, description="memory limit of each process, and of each that it starts, in bytes (on Linux)"
    )
    inherit: tuple[str, ...] = Field(
        (), description='names of further environment variables to pass on from the run, or patterns: "AWS_*"'
    )
    environment: dict[str, str] = Field(default_factory=dict, description="additional environment variables")


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker process, in seconds and bytes; runs need no others.

    start: time for importing the library; a process that dies meanwhile is noticed immediately. heartbeat: interval of
    signs of life. silence: time without one before a process is killed and replaced. cleanup: time for a cancelled
    attempt, and for all when the run ends. output: size of one attempt's result, as JSON. attempts: concurrent
    attempts; further ones wait.
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

    name: name of the library, for messages. handler: file that calls the library (this module's page).
    python: interpreter with the library. remedy: how to install it, for errors. options: argument of the handler's
    `start`.
    cause: cause of failures raised by the handler. lost_cause: cause of failures when a process dies. limits: limits of
    each process.
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


def interpreter(configured: str | None, variable: str, folder: str) -> str:
    """Return the configured interpreter, or the one in $variable's environment, or the one in `folder`."""
    if configured:
        return str(Path(configured).expanduser()) if os.sep in configured else configured
    return str(Path(os.environ.get(variable) or folder).absolute() / "bin" / "python")


class WorkerPool:
    """Async context that plays attempts in `config.processes` processes of one program.

    Each attempt goes to the process with the fewest; beyond `limits.attempts` in each, attempts wait. A process that
    dies, blocks, runs out of memory or has an uncancellable attempt is replaced.
    """

    def __init__(self, program: WorkerProgram, config: WorkerConfig | None = None) -> None:
        self._program, self._config = program, config or WorkerConfig()
        self._slots = [_Slot(program, self._config) for _ in range(self._config.processes)]
        self._places = asyncio.Semaphore(self._config.processes * program.limits.attempts)

    async def __aenter__(self) -> Self:
        """Start all processes. Raises ConfigError, in one line, if that fails: no interpreter, no library."""
        starts = [asyncio.ensure_future(slot.process()) for slot in self._slots]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self._slots))

    async def call(self, payload: Mapping[str, Any], stop: asyncio.Event | None = None) -> Json:
        """Play one attempt: return the handler's result for the payload. Raises TrajectoryFailure if it fails.

        payload: JSON data. stop: once set, the attempt is asked to end, but still gives a result. Cancelling the call
        cancels the attempt, and waits for at most `limits.cleanup` seconds.
        """
        async with self._places:
            slot = min(self._slots, key=lambda slot: slot.calls)
            slot.calls += 1
            try:
                process = await slot.process()
                return await process.play(payload, stop)
            except ConfigError as error:
                message = f"a worker cannot be restarted: {error}"
                raise TrajectoryFailure(Cause.INFRASTRUCTURE, message) from error
            finally:
                slot.calls -= 1

    @property
    def ready(self) -> Ready:
        """First message of the first process, since its last start."""
        ready = self._slots[0].ready
        assert ready is not None, "the pool has not been entered"
        return ready


async def call_once(program: WorkerProgram, worker: Mapping[str, Any] | None, payload: Mapping[str, Any]) -> Json:
    """Make one call in a separate process. worker: keys of `WorkerConfig`. Raises ConfigError, TrajectoryFailure."""
    async with WorkerPool(program, build(WorkerConfig, {**(worker or {}), "processes": 1})) as pool:
        return await pool.call(payload)


class _Slot:
    """Slot of one process: the current one, and earlier ones with unfinished attempts.

    calls: calls in progress, including those waiting for the process to start. ready: first message of the latest
    process.
    """

    def __init__(self, program: WorkerProgram, config: WorkerConfig) -> None:
        self._program, self._config = program, config
        self._lock = asyncio.Lock()
        self._process: WorkerProcess | None = None
        self._draining: dict[asyncio.Task[None], WorkerProcess] = {}
        self.ready: Ready | None = None
        self.calls = self.starts = 0

    async def process(self) -> WorkerProcess:
        """Return a callable process, started if necessary. Raises ConfigError."""
        async with self._lock:
            if self._process is not None and not self._process.is_usable:
                draining = asyncio.create_task(self._process.drain())
                self._draining[draining] = self._process
                draining.add_done_callback(self._draining.pop)
                self._process = None
            if self._process is None:
                process = WorkerProcess(self._program, self._config)
                self.ready = await process.open()
                self._process, self.starts = process, self.starts + 1
            return self._process

    async def close(self) -> None:
        async with self._lock:
            draining = dict(self._draining)
            current = [self._process] if self._process is not None else []
            await asyncio.gather(*(process.close() for process in [*draining.values(), *current]))
            await asyncio.gather(*draining)


class WorkerProcess:
    """One worker process, which plays attempts after `open` and until `close`.

    playing: attempts in progress at its last heartbeat; None before it.
    Invariant: each call ends, at the latest when the process does; `is_usable` is false from then on, and once an
    attempt could not be cancelled.
    """

    def __init__(self, program: WorkerProgram, config: WorkerConfig) -> None:
        self._program, self._config, self._limits = program, config, program.limits
        self._process: Program
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._listening: asyncio.Task[None]
        self._calls = Calls(self._send, self._failure)
        self._names = itertools.count()  # of attempts
        self._ended = ""  # how, once it has
        self.is_usable = False
        self.playing: int | None = None

    async def open(self) -> Ready:
        """Start the process and wait until the library is imported. Raises ConfigError if that fails."""
        program, limits = self._program, self._limits
        if shutil.which(program.python) is None:
            raise ConfigError(f"{program.name}: {program.python!r} is not an interpreter; {program.remedy}")
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=limits.output + _ENVELOPE)
            words = [program.python, str(_CHILD), str(program.handler.absolute())]
            try:
                self._process = Program(words, self._variables(), theirs.fileno(), grace=limits.cleanup)
            except BaseException:
                self._writer.close()
                raise
        self._listening = asyncio.create_task(self._listen())
        settings: Json = {"heartbeat": limits.heartbeat, "patience": limits.silence, "output_limit": limits.output}
        settings |= {"memory_limit": self._config.memory_limit, "options": dict(program.options)}
        try:
            async with asyncio.timeout(limits.start):
                ready = Ready(**await self._calls.call("start", settings))
        except BaseException as error:
            await self._end()
            if isinstance(error, TimeoutError):
                problem = f"not ready after {limits.start:g} s"
            elif isinstance(error, TrajectoryFailure):
                problem = self._ended or error.message
            else:
                raise
            raise ConfigError(f"{program.name} in {program.python}: {problem}; {program.remedy}") from error
        self.is_usable = True
        return ready

    async def play(self, payload: Mapping[str, Any], stop: asyncio.Event | None = None) -> Json:
        """Play one attempt and return its result. Raises TrajectoryFailure. See `WorkerPool.call`."""
        name = next(self._names)
        number, answer = self._calls.start("play", name, dict(payload))
        stopping = asyncio.ensure_future(stop.wait()) if stop is not None else None
        try:
            if stopping is not None:
                waited: set[asyncio.Future[Any]] = {answer, stopping}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    self._calls.post("stop", name)
            await asyncio.wait({answer})
        except asyncio.CancelledError:
            self._calls.cancel(number)
            try:
                await asyncio.wait({answer}, timeout=self._limits.cleanup)
            finally:
                if answer.cancel():  # apparently still running
                    self.is_usable = False
            raise
        finally:
            if stopping is not None:
                stopping.cancel()
        result: Json = answer.result()
        return result

    async def drain(self) -> None:
        """Let the attempts end by themselves, or through `close`; then close."""
        self.is_usable = False
        while waiting := self._calls.waiting:
            await asyncio.wait(waiting)
        await self.close()

    async def close(self) -> None:
        """Cancel all attempts, give them `limits.cleanup` seconds to clean up, and end the process."""
        self.is_usable = False
        if not self._listening.done():
            if not self._writer.is_closing():
                # The process cancels all attempts and ends.
                self._writer.write_eof()
            await asyncio.wait({self._listening}, timeout=self._limits.cleanup)
        await self._end()
        self._fail("was closed")

    def _variables(self) -> dict[str, str]:
        kept = self._config.inherit
        inherited = inherited_variables(kept).items()
        mine = {name: value for name, value in inherited if name not in _OTHER_PYTHON or name in kept}
        return {**mine, "PYTHONUNBUFFERED": "1", **self._config.environment}

    def _send(self, message: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        """Take answers and heartbeats until the process ends, or is silent for `limits.silence` seconds."""
        blocked, broken = False, ""
        try:
            line = await self._line()  # of `start`, which has a limit of its own
            while line:
                number, value, error = json.loads(line)
                if number is None:
                    self.playing = value
                else:
                    self._calls.take(number, value, error)
                line = await self._line_in_time()
        except TimeoutError:
            blocked = True
        except (ValueError, RecursionError) as error:
            broken = f"wrote a line that cannot be read ({error}) and "
        self.is_usable = False
        await self._process.stop()
        self._ended = broken + await self._death(blocked)
        self._fail(self._ended)

    async def _line_in_time(self) -> bytes:
        try:
            async with asyncio.timeout(self._limits.silence):
                return await self._line()
        except TimeoutError:
            # This event loop itself may have been blocked: read pending data first.
            async with asyncio.timeout(self._limits.heartbeat):
                return await self._line()

    async def _line(self) -> bytes:
        """Return the next line; empty once the process has ended."""
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):  # gone, or a line beyond the limit
            return b""
        return line if line.endswith(b"\n") else b""

    async def _death(self, blocked: bool = False) -> str:
        """Wait for the end of the process; return how it ended, in words. blocked: killed for its silence."""
        result = await self._process.result()
        if blocked and result and "error" not in result:
            places = _PLACE.findall(result["stderr"])
            # The main thread is listed last.
            where = ", in {2}, {0}:{1}".format(*places[-1]) if places else ""
            return f"was killed: it gave no sign of life for {self._limits.silence:g} s{where}"
        return how_it_ended(result)

    async def _end(self) -> None:
        self._listening.cancel()
        await asyncio.wait({self._listening})
        self._writer.close()
        await self._process.stop()

    def _failure(self, error: Json) -> TrajectoryFailure:
        # Little is left for the others: let them end, and start a new process.
        if error["type"] == MemoryError.__name__:
            self.is_usable = False
        return TrajectoryFailure(self._program.cause, error["message"], error["traceback"])

    def _fail(self, why: str) -> None:
        self._calls.fail(TrajectoryFailure(self._program.lost_cause, f"the {self._program.name} worker {why}"))
