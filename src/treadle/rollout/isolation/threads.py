"""Threads that user code runs in. They are daemons: one that never returns does not keep the process from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class AttemptThread(Executor):
    """Makes all calls of an attempt on one thread, in order: SQLite connections and browsers must stay on theirs.

    abandoned: nobody waits for the call that it is making; the calls after it are still made when that one returns.
    """

    def __init__(self, name: str) -> None:
        self.abandoned = False
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        _Worker(self, name).start()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue the call behind those before it; return its future."""
        future: Future[T] = Future()
        self._calls.put(partial(_settle, future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End the thread after the calls that were submitted, without waiting for it."""
        self._calls.put(None)

    def work(self) -> None:
        """Make calls until the thread is shut down."""
        while (call := self._calls.get()) is not None:
            call()


class _Worker(threading.Thread):
    def __init__(self, owner: AttemptThread, name: str) -> None:
        super().__init__(target=owner.work, name=name, daemon=True)
        self.owner = owner


def abandoned_threads() -> list[threading.Thread]:
    """Return the threads that still make a call for which nobody waits any more."""
    return [thread for thread in threading.enumerate() if isinstance(thread, _Worker) and thread.owner.abandoned]


class DaemonThreads(ThreadPoolExecutor):
    """Serves as an event loop's default executor: each call (`asyncio.to_thread`) has a daemon thread of its own.

    The standard one has a few threads that all share, and waits for them on exit: calls that never return would keep
    others from being made, and the process from exiting.
    """

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start the call now; return its future."""
        future: Future[T] = Future()
        call = partial(_settle, future, partial(function, *args, **kwargs))
        threading.Thread(target=call, name="treadle-to-thread", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Return at once; no thread is waited for."""


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except StopIteration as error:  # no awaitable can raise it: whoever awaits this would wait for ever
        replacement = RuntimeError(f"StopIteration: {error}")
        replacement.__cause__ = error
        future.set_exception(replacement)
    except BaseException as error:  # noqa: BLE001  # as any executor: it is the caller's, not the thread's
        future.set_exception(error)
    else:
        future.set_result(result)
