"""`Gang`: workers that answer every call together.

    call(method, *arguments) --> worker 0 .. W-1: await object.method(*arguments) --> all answers, or the first error

Learner ranks wait for each other in collectives. One that fails alone leaves the others waiting, and cannot be
replaced: all of them are then ended, and the caller gets its error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from treadle.core.errors import PlacementError, RankError, TreadleError, WorkerLost
from treadle.workers.worker import Worker

W = TypeVar("W", bound=Worker)
T = TypeVar("T")

_GRACE = 2.0  # seconds for the others to fail, too, before all are ended


class Gang(Generic[W]):
    """Opens the workers, and makes each call on all of them, one call at a time, from the caller's thread.

    over: why no further call is answered. busy: whether a call waits for its answers, perhaps on another thread.

    Raises the error of the first worker to fail: its own if it is Treadle's, otherwise a `RankError`.
    """

    def __init__(self, workers: Sequence[W]) -> None:
        self.over: str | None = None
        self.busy = False
        self._workers = workers
        self._loop = asyncio.new_event_loop()  # callers may have a loop of their own, which they block
        self._thread = threading.Thread(target=self._loop.run_forever, name="treadle-gang", daemon=True)
        self._thread.start()
        self._together(self._workers, lambda worker: worker.open())

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Return every worker's answer. If all fail with Treadle's own errors, they stay open."""
        return self._together(self._workers, lambda worker: worker.call(method, *arguments))

    def call_first(self, method: str, *arguments: Any) -> Any:
        """Return the first worker's answer."""
        [answer] = self._together(self._workers[:1], lambda worker: worker.call(method, *arguments))
        return answer

    def kill(self) -> None:
        """End the workers immediately, even while a call waits for them, which then fails."""
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """End the workers. Idempotent."""
        self.over = self.over or "the ranks were closed"
        if not self._loop.is_closed():
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _together(self, workers: Sequence[W], call: Callable[[W], Coroutine[Any, Any, Any]]) -> list[Any]:
        if self.over is not None:
            raise RankError(self.over)
        self.busy = True
        try:
            return self._run(self._answers(workers, call))
        except BaseException as error:
            # Interrupted: the workers are in an undefined state.
            if not isinstance(error, TreadleError):
                self.over = "a call of the ranks was interrupted"
            if self.over is not None:
                self.close()
            raise
        finally:
            self.busy = False

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _answers(self, workers: Sequence[W], call: Callable[[W], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return all answers; after a first failure, wait for at most `_GRACE` seconds."""
        calls = [asyncio.ensure_future(call(worker)) for worker in workers]
        waiting, errors = set(calls), list[TreadleError]()
        loop, deadline = asyncio.get_running_loop(), float("inf")
        while waiting and (left := deadline - loop.time()) > 0:
            patience = None if not errors else left
            done, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            errors += [_as_rank_error(error) for each in done if (error := each.exception()) is not None]
            deadline = loop.time() + _GRACE if errors and patience is None else deadline
        if not errors:
            return [each.result() for each in calls]
        # A worker that ended makes the others fail, perhaps before its end is noticed.
        first = min(errors, key=lambda error: not isinstance(error.__cause__, WorkerLost))
        if len(errors) < len(calls) or any(isinstance(error, RankError) for error in errors):
            self.over = str(first)
        raise first

    async def _close(self) -> None:
        """End the workers, and everything that waits for them."""
        await asyncio.gather(*(worker.close() for worker in self._workers))
        if calls := asyncio.all_tasks() - {asyncio.current_task()}:
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


def _as_rank_error(error: BaseException) -> TreadleError:
    """Return a Treadle error raised by the worker, or a RankError caused by an error of placement."""
    if isinstance(error, TreadleError) and not isinstance(error, PlacementError):
        return error
    if not isinstance(error, PlacementError):
        raise error
    failure = RankError(str(error))
    failure.__cause__ = error
    return failure
