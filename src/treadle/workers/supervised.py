"""Restarts of worker processes that end or stop answering.

Supervised: make -> Worker -> prepare -> (ended, or silent) -> make ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from treadle.core.engine import ProcessId
from treadle.core.errors import PlacementError, TreadleError, WorkerLost
from treadle.workers.worker import Worker

_PERIOD = 5.0  # seconds between pings
SILENCE = 60.0  # seconds without an answer to a ping before a worker is replaced
_PARTS = 4  # number of parts of the wait for a ping
_STARTING = 600.0  # seconds for starting and preparing a worker
_FRUITLESS = 3  # consecutive workers that end before answering a call, before giving up


W = TypeVar("W", bound=Worker)


class Supervised(Generic[W]):
    """Keeps one worker running: starts another when it ends, or leaves a ping unanswered for `silence` seconds.

    make: creates a worker. open: prepares it once it runs. notify: receives a line at each restart. Gives up when a
    worker cannot be opened, or when the third in a row ends before it has answered a call.

    last_ping: the latest answer to a ping. error: why it has given up or was closed; "" until then.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], W],
        open: Callable[[W], Awaitable[None]],
        notify: Callable[[str], None],
        silence: float = SILENCE,
    ) -> None:
        self._name, self._make, self._open, self._notify, self._silence = name, make, open, notify, silence
        self.error = ""
        self.last_ping: Any = None
        self._loop = asyncio.get_running_loop()
        self._worker: asyncio.Future[W] = self._loop.create_future()
        self._ending: asyncio.Future[str] = self._loop.create_future()
        self._answered = 0
        self._latest: W | None = None
        self._keeping = self._loop.create_task(self._keep())

    @property
    def is_up(self) -> bool:
        return self._worker.done() and not self.error

    @property
    def worker(self) -> W | None:
        return self._worker.result() if self.is_up else None

    @property
    def process(self) -> ProcessId | None:
        return self._worker.result().process if self.is_up else None

    async def ready(self) -> W:
        """Return the worker once it is ready. Raises PlacementError, and passes on errors of opening it."""
        return await asyncio.shield(self._worker)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the worker once it is ready. Raises as `Worker.call` and `ready` do."""
        worker = await self.ready()
        try:
            answer = await worker.call(method, *arguments)
        except WorkerLost as error:
            self._lose(worker, str(error))
            raise
        self._answered += 1
        return answer

    async def close(self) -> None:
        self.error = self.error or f"{self._name} was closed"
        self._keeping.cancel()
        await asyncio.wait([self._keeping])
        if self._latest is not None:
            await self._latest.close()
        if not self._worker.done():
            self._worker.set_exception(PlacementError(self.error))
        # Retrieve it so that asyncio does not log it.
        self._worker.exception()

    def _lose(self, worker: W, reason: str) -> None:
        if self.is_up and self._worker.result() is worker:
            self._worker = self._loop.create_future()
            self._ending.set_result(reason)

    async def _keep(self) -> None:
        """Start one worker after another."""
        fruitless = 0
        while True:
            self._latest = worker = self._make()
            refusal: TreadleError | None = None
            try:
                await self._opened(worker)
                self._ending, self._answered = self._loop.create_future(), 0
                self._worker.set_result(worker)
                await self._watch(worker)
                fruitless = 0 if self._answered else fruitless + 1
                ending = self._ending.result()
            except WorkerLost as error:
                # Its node may be lost without Ray having noticed.
                fruitless, ending = fruitless + 1, str(error)
            except TreadleError as error:
                refusal = error
            await worker.close()
            if refusal is None and fruitless == _FRUITLESS:
                refusal = PlacementError(f"{ending}\n{_FRUITLESS} attempts to start it failed")
            if refusal is not None:
                return self._give_up(refusal)
            self._notify(f"{ending.splitlines()[0]}; restarting it")

    async def _opened(self, worker: W) -> None:
        try:
            async with asyncio.timeout(_STARTING):
                await worker.open()
                await self._open(worker)
        except TimeoutError as error:
            raise PlacementError(f"{self._name} did not start within {_STARTING:g} s{worker.tail()}") from error

    async def _watch(self, worker: W) -> None:
        """Ping the worker; return once it has ended or stopped answering."""
        while not self._ending.done():
            ping = asyncio.ensure_future(worker.call("ping"))
            try:
                # In parts: one may pass while this event loop is blocked.
                for _ in range(_PARTS):
                    if not ping.done():
                        await asyncio.wait([ping, self._ending], timeout=self._silence / _PARTS)
            finally:
                answered = not ping.cancel()
            if not answered:
                self._lose(worker, f"{self._name} did not answer for {self._silence:g} s{worker.tail()}")
            elif isinstance(error := ping.exception(), WorkerLost):
                self._lose(worker, str(error))
            else:
                self.last_ping = ping.result()
                await asyncio.wait([self._ending], timeout=_PERIOD)

    def _give_up(self, error: TreadleError) -> None:
        self.error = str(error)
        if self._worker.done():
            self._worker = self._loop.create_future()
        self._worker.set_exception(error)
        # Retrieve it so that asyncio does not log it.
        self._worker.exception()
