"""User code (environments, agents, hooks), called with a time limit, its failures attributed.

UserCode.call -> a task -> async functions
                   └────── other functions, on the attempt's thread
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

from treadle.core.errors import Cause, TrajectoryFailure
from treadle.rollout.isolation.interrupts import Interrupt
from treadle.rollout.isolation.threads import CallThread, abandoned_threads
from treadle.rollout.isolation.tracebacks import coroutine_frames, user_place, user_traceback

T = TypeVar("T")

MAX_ABANDONED = 64
"""Threads that may be stuck in calls that never return; attempts that need another one fail."""

_LONGEST = 2000  # characters of a failure's message

RUNNING: ContextVar[UserCode | None] = ContextVar("treadle_user_code", default=None)
"""User code that a task or callback belongs to."""

_abandoned: set[asyncio.Task[Any]] = set()


class UserCode:
    """Calls the user code of one attempt.

    name: "environment 'lookup'". cause: of what it raises. attempt: "task 7, trajectory g000003.1".
    blocked_seconds: time for which it blocked the event loop, a second or longer at a time.
    """

    def __init__(self, name: str, cause: Cause, attempt: str = "") -> None:
        self.name, self.cause, self.attempt = name, cause, attempt
        self.blocked_seconds = 0.0
        self.thread: CallThread | None = None

    async def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        what: str,
        timeout: float,
        check: Callable[[Any], T] = lambda value: value,
        cause: Cause | None = None,
        grace: float = 0.0,
        in_thread: bool | None = None,
    ) -> T:
        """Call the function for at most `timeout` seconds, and return what `check` makes of its result.

        Whatever the function or `check` raises becomes a TrajectoryFailure of this cause (default: `self.cause`); a
        TrajectoryFailure keeps its own. When its time is up, the call is cancelled and fails with cause timeout; a
        thread cannot be cancelled, and is abandoned.

        what: the call, for messages. grace: seconds to clean up in after the time limit. in_thread: whether to call it
        on the attempt's thread; default: unless it is `async`.
        """
        cause = cause or self.cause
        in_thread = not is_async(function) if in_thread is None else in_thread
        thread = self._own_thread() if in_thread else None
        call = _result(partial(function, *arguments), check, what, cause, thread)
        context = copy_context()
        context.run(RUNNING.set, self)
        loop, name = asyncio.get_running_loop(), f"{self.name} ({self.attempt}), {what}"
        task = loop.create_task(call, name=name, context=context)
        place = ""
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout)
            if not done:
                place = user_place(coroutine_frames(task.get_coro()) if thread is None else thread.frames())
                _cancel(task, thread)
                if grace:
                    await asyncio.wait({task}, timeout=grace)
        except asyncio.CancelledError:
            _cancel(task, thread)
            raise
        if not done:
            raise TrajectoryFailure(Cause.TIMEOUT, f"{what} took longer than {timeout:g} s", place and f"at {place}")
        result = attributed(asyncio.CancelledError(), what, cause) if task.cancelled() else task.result()
        if isinstance(result, TrajectoryFailure):
            raise result
        return result

    def release(self) -> None:
        """End the attempt's thread after the calls already queued."""
        if self.thread is not None:
            self.thread.shutdown()

    def _own_thread(self) -> CallThread:
        if self.thread is None:
            if len(stuck := abandoned_threads()) >= MAX_ABANDONED:
                raise TrajectoryFailure(
                    Cause.INFRASTRUCTURE,
                    f"{len(stuck)} threads are stuck in calls that took too long and never returned, and no attempt "
                    f"gets another one; one is of {stuck[-1].name}",
                )
            self.thread = CallThread(f"{self.name} ({self.attempt})")
        return self.thread


async def _result(
    function: Callable[[], Any], check: Callable[[Any], T], what: str, cause: Cause, thread: CallThread | None
) -> T | TrajectoryFailure:
    try:
        if thread is None:
            value = function()
        else:
            value = await asyncio.get_running_loop().run_in_executor(thread, copy_context().run, function)
        return check(await value if inspect.isawaitable(value) else value)
    except BaseException as error:  # a task that raises SystemExit would end the event loop
        if isinstance(error, Interrupt):
            raise
        return attributed(error, what, cause)


def _cancel(task: asyncio.Task[Any], thread: CallThread | None) -> None:
    """Cancel the task, and keep a reference to it until it ends."""
    if not task.done():
        task.cancel()
        _abandoned.add(task)
        task.add_done_callback(_abandoned.discard)
        if thread is not None:
            thread.abandon()


def abandoned_tasks() -> set[asyncio.Task[Any]]:
    """Return the calls that were cancelled and have not ended."""
    return set(_abandoned)


def is_async(function: object) -> bool:
    """Return whether calling it gives a coroutine: an `async def`, or an object whose call is one."""
    if inspect.isclass(function):
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def attributed(error: BaseException, what: str, cause: Cause) -> TrajectoryFailure:
    """Return a failure of this cause for an exception of user code; a TrajectoryFailure keeps its own cause."""
    try:
        if isinstance(error, TrajectoryFailure):
            return TrajectoryFailure(error.cause, error.message, error.traceback or user_traceback(error))
    except BaseException as worse:  # somebody has tampered with it
        if isinstance(worse, Interrupt):
            raise
    if isinstance(error, SystemExit | KeyboardInterrupt):
        message = f"{what} tried to exit the process ({_text(error) or type(error).__name__})"
    else:
        message = raised(what, error)
    failure = TrajectoryFailure(cause, message[:_LONGEST], user_traceback(error))
    failure.__cause__ = error
    return failure


def raised(what: str, error: BaseException) -> str:
    """Return `WHAT raised TYPE: TEXT`, with lone surrogates escaped."""
    return f"{what} raised {type(error).__name__}: {_text(error)}".encode(errors="backslashreplace").decode()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as worse:  # user code, too
        if isinstance(worse, Interrupt):
            raise
        return "(and its text could not be made)"
