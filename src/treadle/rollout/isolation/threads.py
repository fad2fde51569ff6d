"""Daemon threads for user code: a call that never returns does not keep the process from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from treadle.rollout.isolation.tracebacks import thread_frames

P = ParamSpec("P")
T = TypeVar("T")

_abandoned: set[CallThread] = set()


class CallThread(Executor):
    """Runs calls in order on one thread, as SQLite connections and browsers require.

    is_abandoned: nobody waits any longer for the call in progress. Calls behind it run once it returns.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put(partial(_run, future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        self._calls.put(None)

    def abandon(self) -> None:
        _abandoned.add(self)

    def frames(self) -> Iterator[FrameType]:
        return thread_frames(self.thread.ident)

    @property
    def is_abandoned(self) -> bool:
        return self in _abandoned

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        _abandoned.discard(self)


def abandoned_threads() -> list[threading.Thread]:
    """Return the threads stuck in calls that nobody waits for any longer."""
    return [each.thread for each in list(_abandoned)]


class DaemonThreads(ThreadPoolExecutor):
    """Default executor for an event loop: a daemon thread for each call (`asyncio.to_thread`).

    The standard one shares a few threads and joins them on exit: calls that never return would block both.
    """

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        thread = CallThread("treadle-to-thread")
        future = thread.submit(function, *args, **kwargs)
        thread.shutdown()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        return None


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except StopIteration as error:  # an asyncio future cannot hold it: its caller would wait forever
        future.set_exception(RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__))
    except BaseException as error:  # noqa: BLE001  # raised again where the result is awaited
        future.set_exception(error)
    else:
        future.set_result(result)
