"""`WorkerPool`: a few processes that play many attempts each, started again when they die."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from treadle.core.errors import Cause, ConfigError, TrajectoryFailure
from treadle.integrations.worker.config import WorkerConfig
from treadle.integrations.worker.process import Ready, WorkerProcess, WorkerProgram


class WorkerPool:
    """Async context that plays attempts in `config.processes` processes of one program.

    Each attempt goes to the process with the fewest; beyond `limits.attempts` in each, attempts wait. A process that
    dies, blocks, runs out of memory or has an attempt that cannot be cancelled is replaced.
    """

    def __init__(self, program: WorkerProgram, config: WorkerConfig | None = None) -> None:
        self._program, self._config = program, config or WorkerConfig()
        self._slots = [_Slot(program, self._config) for _ in range(self._config.processes)]
        self._places = asyncio.Semaphore(self._config.processes * program.limits.attempts)

    async def __aenter__(self) -> Self:
        """Start all processes. Raises ConfigError, one line, if one cannot be: no interpreter, no library."""
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

    async def call(self, payload: Mapping[str, Any], stop: asyncio.Event | None = None) -> dict[str, Any]:
        """Play one attempt: return what the handler returns for the payload. Raises TrajectoryFailure if it fails.

        payload: what JSON can hold. stop: once it is set, the attempt is asked to come to its end, and still gives a
        result. Cancelling the call cancels the attempt, and waits for `limits.cleanup` seconds at most.
        """
        async with self._places:
            slot = min(self._slots, key=lambda slot: slot.calls)
            slot.calls += 1
            try:
                return await (await self._restarted(slot)).call(dict(payload), stop)
            finally:
                slot.calls -= 1

    @property
    def ready(self) -> Ready:
        """First message of the first process, since its last start."""
        ready = self._slots[0].ready
        assert ready is not None, "the pool has not been entered"
        return ready

    @property
    def playing(self) -> list[int | None]:
        """Attempts in progress at the last heartbeat of each process; None before it."""
        return [slot.playing for slot in self._slots]

    @property
    def restarts(self) -> int:
        """Number of processes that were replaced."""
        return sum(slot.starts - 1 for slot in self._slots)

    async def _restarted(self, slot: _Slot) -> WorkerProcess:
        try:
            return await slot.process()
        except ConfigError as error:
            raise TrajectoryFailure(Cause.INFRASTRUCTURE, f"a worker cannot be started again: {error}") from error

    async def _close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self._slots))


class _Slot:
    """Slot of one process: the current one, and earlier ones whose attempts are not over yet.

    calls: in progress, including those that wait for the process to start. ready: first message of the latest process.
    """

    def __init__(self, program: WorkerProgram, config: WorkerConfig) -> None:
        self._program, self._config = program, config
        self._lock = asyncio.Lock()
        self._process: WorkerProcess | None = None
        self._draining: dict[asyncio.Task[None], WorkerProcess] = {}
        self.ready: Ready | None = None
        self.calls = self.starts = 0

    async def process(self) -> WorkerProcess:
        """Return a process that can be called, started if need be. Raises ConfigError."""
        async with self._lock:
            if self._process is not None and not self._process.is_usable:
                draining = asyncio.create_task(self._process.drain())
                self._draining[draining] = self._process
                draining.add_done_callback(self._draining.pop)
                self._process = None
            if self._process is None:
                self._process = await WorkerProcess.start(self._program, self._config)
                self.starts += 1
                self.ready = self._process.ready
            return self._process

    @property
    def playing(self) -> int | None:
        return None if self._process is None else self._process.playing

    async def close(self) -> None:
        async with self._lock:
            draining = dict(self._draining)
            current = [self._process] if self._process is not None else []
            await asyncio.gather(*(process.close() for process in [*draining.values(), *current]))
            await asyncio.gather(*draining)
