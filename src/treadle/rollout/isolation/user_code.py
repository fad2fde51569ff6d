"""User code (environments, agent programs, hooks), behind the one boundary through which a run calls it.

    UserCode.call -> a task in the user code's own context -> reset, step, close, agent(task, client)
                                └── plain functions: on the attempt's own thread

Whatever it does is attributed once, here: what it raises, how long it takes, what it does to the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from treadle.core.errors import Cause, TrajectoryFailure
from treadle.rollout.isolation.interrupts import is_interrupt
from treadle.rollout.isolation.loop_monitor import BLOCKED, LoopMonitor
from treadle.rollout.isolation.threads import AttemptThread, abandoned_threads
from treadle.rollout.isolation.tracebacks import user_traceback

T = TypeVar("T")

MOST_ABANDONED = 64
"""Threads that may be stuck in calls that never return, before no attempt gets another one."""

_LONGEST = 2000  # characters of a failure's message


class UserCode:
    """Runs the user code of one attempt.

    name: of the code, for people: "environment 'lookup'". cause: of what it raises. attempt: the trajectory's id.
    blocked_seconds: for which it held the event loop, in turns of `BLOCKED` seconds and more.

    Invariant: nothing that it raises reaches the event loop, and no task that it starts can end it.
    """

    def __init__(self, name: str, cause: Cause, attempt: str = "", monitor: LoopMonitor | None = None) -> None:
        self.name, self.cause, self.attempt = name, cause, attempt
        self.monitor = monitor or LoopMonitor()
        self.blocked_seconds = self.turn_seconds = 0.0
        self._thread: AttemptThread | None = None
        self._calling = name, cause  # the method that is being called, and the cause of what it raises
        self._exit: asyncio.Future[TrajectoryFailure] = asyncio.get_running_loop().create_future()

    async def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        what: str,
        timeout: float,
        check: Callable[[Any], T],
        cause: Cause | None = None,
        grace: float = 0.0,
        in_thread: bool | None = None,
    ) -> T:
        """Call the function for at most `timeout` seconds; return what `check` makes of its result.

        Raises TrajectoryFailure: of this cause (default: its own) for whatever it or `check` raises, unless that is a
        TrajectoryFailure itself, from code that knows better (an environment whose verifier failed: `Cause.VERIFIER`);
        of cause timeout when its time is over. Seconds for which others block the event loop do not count.

        what: the call, for people. grace: seconds that code whose time is over has to clean up. in_thread: on the
        attempt's own thread, where a call goes on when nobody waits for it any more; default: unless it is `async`.
        """
        cause = cause or self.cause
        self._calling = what, cause
        in_thread = not is_async(function) if in_thread is None else in_thread
        clock = self.clock()
        work = self._task(self._called(partial(function, *arguments), check, what, cause, in_thread))
        try:
            in_time = await self._ended(work, timeout, clock)
        finally:
            if not work.done():
                self._leave(work, in_thread)
            elif not work.cancelled():
                work.exception()  # retrieved also where an interrupt ends the event loop: asyncio would complain later
        if not in_time and grace:
            await asyncio.wait({work}, timeout=grace)
        error = _error_of(work) if work.done() else None
        self._raise_exit()
        if not in_time or clock.was_overrun(timeout):
            raise TrajectoryFailure(Cause.TIMEOUT, f"{what} took longer than {timeout:g} s")
        if error is not None:
            raise attributed(error, what, cause) from error
        return work.result()

    def run(self, function: Callable[[], T], what: str) -> T:
        """Call the function on the event loop, now, and return its result. Raises TrajectoryFailure as `call` does."""
        self._calling = what, self.cause
        try:
            return self._context().run(self.turn, function)
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._raise_exit()
            raise attributed(error, what, self.cause) from error

    def clock(self) -> Clock:
        """Return a clock that starts now and counts the seconds that go towards a limit."""
        return Clock(self)

    def turn(self, resume: Callable[..., T], *arguments: Any) -> T:
        """Run the code until it waits or returns. What would end the event loop ends the attempt instead."""
        outer = self.monitor.begin(self.name, self.attempt)
        try:
            return resume(*arguments)
        except (SystemExit, KeyboardInterrupt) as error:
            if is_interrupt(error):
                raise
            failure = attributed(error, *self._calling)
            if not self._exit.done():
                self._exit.set_result(failure)
            raise failure from error
        finally:
            seconds = self.monitor.end(outer)
            if outer is None:
                self.turn_seconds += seconds
                self.blocked_seconds += seconds if seconds >= BLOCKED else 0.0

    # --- its thread ----------------------------------------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        """Return whether its thread is in a call that nobody waits for any more."""
        return self._thread is not None and self._thread.abandoned

    def post(self, function: Callable[[], object]) -> None:
        """Queue the function on the attempt's thread, if there is one. Nothing waits for it or for its result."""
        if self._thread is not None:
            self._thread.submit(function)

    def release(self) -> None:
        """End the thread, once it has made the calls that were submitted to it."""
        if self._thread is not None:
            self._thread.shutdown()

    def _own_thread(self) -> AttemptThread:
        if self._thread is None:
            if len(stuck := abandoned_threads()) >= MOST_ABANDONED:
                raise TrajectoryFailure(
                    Cause.INFRASTRUCTURE,
                    f"{len(stuck)} threads are stuck in calls that took too long and never returned, and no attempt "
                    f"gets another one; the last is of {stuck[-1].name}",
                )
            self._thread = AttemptThread(f"{self.name} ({self.attempt})")
        return self._thread

    # --- one call ------------------------------------------------------------------------------------------------

    async def _called(
        self, function: Callable[[], Any], check: Callable[[Any], T], what: str, cause: Cause, in_thread: bool
    ) -> T:
        if not in_thread:
            result = function()
            return check(await result if inspect.isawaitable(result) else result)
        thread, loop = self._own_thread(), asyncio.get_running_loop()
        call = partial(copy_context().run, _in_thread, function, check, what, cause)
        answer = await loop.run_in_executor(thread, call)
        if isinstance(answer, TrajectoryFailure):
            raise answer
        return answer.value if answer.checked else check(await answer.value)

    def _context(self) -> Context:
        """Return the context in which it runs; the tasks that it starts inherit it, and are recognised by that."""
        loop = asyncio.get_running_loop()
        factory = loop.get_task_factory()
        if not isinstance(factory, _TaskFactory):
            loop.set_task_factory(_TaskFactory(factory))
        context = copy_context()
        context.run(_current.set, self)
        return context

    def _task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.get_running_loop().create_task(coroutine, context=self._context())

    async def _ended(self, work: asyncio.Task[Any], timeout: float, clock: Clock) -> bool:
        """Wait until it has returned, or a task of it tried to exit; return whether that was in time."""
        waiting: set[asyncio.Future[Any]] = {work} if self._exit.done() else {work, self._exit}
        left = timeout
        while left > 0:
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return True
            left = timeout - clock.seconds()
        return False

    def _raise_exit(self) -> None:
        if self._exit.done():
            failure, self._exit = self._exit.result(), asyncio.get_running_loop().create_future()
            raise failure

    def _leave(self, work: asyncio.Task[Any], in_thread: bool) -> None:
        """Stop waiting for the task, and hold a reference to it until it ends, which nothing else does."""
        work.cancel()
        _left_running.add(work)
        work.add_done_callback(_ended)
        if in_thread and self._thread is not None:
            self._thread.abandoned = True


class Clock:
    """Counts the seconds of a limit: all since it was made, except those in which others blocked the loop."""

    def __init__(self, user: UserCode) -> None:
        self._user, self._loop = user, asyncio.get_running_loop()
        self._started, self._turns, self._others = self._loop.time(), user.turn_seconds, self._blocked_by_others()

    def seconds(self) -> float:
        """Return the seconds counted so far."""
        return self._loop.time() - self._started - (self._blocked_by_others() - self._others)

    def was_overrun(self, limit: float) -> bool:
        """Return whether the limit passed while its own code held the event loop, where nothing could end it."""
        return 0 < self.seconds() - limit <= self._user.turn_seconds - self._turns

    def _blocked_by_others(self) -> float:
        return self._user.monitor.blocked_seconds - self._user.blocked_seconds


# --- tasks of user code -----------------------------------------------------------------------------------------------

_current: ContextVar[UserCode | None] = ContextVar("treadle_user_code", default=None)
_left_running: set[asyncio.Task[Any]] = set()


def current_user_code() -> UserCode | None:
    """Return the user code that the caller runs in; None outside of any."""
    return _current.get()


def user_code_of(task: asyncio.Task[Any]) -> UserCode | None:
    """Return the user code that a task belongs to; None for one of Treadle's own."""
    coroutine = task.get_coro()
    return coroutine.user if isinstance(coroutine, _UserCoroutine) else None


def _ended(task: asyncio.Task[Any]) -> None:
    _left_running.discard(task)
    _error_of(task)  # retrieves the error, or asyncio would complain


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError("cancelled itself") if task.cancelled() else task.exception()


class _UserCoroutine(Coroutine[Any, Any, Any]):
    """What a task of user code runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], user: UserCode) -> None:
        self.coroutine, self.user = coroutine, user

    def send(self, value: Any) -> Any:
        return self.user.turn(self.coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self.user.turn(self.coroutine.throw, *error)

    def close(self) -> None:
        self.coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.coroutine.__await__()

    def __getattr__(self, name: str) -> Any:  # cr_frame and others, for code that shows tasks
        return getattr(self.coroutine, name)


class _TaskFactory:
    """Makes an event loop's tasks as `inner` does, those of user code with `_UserCoroutine`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner or _make_task

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        context = options.get("context")
        user = _current.get() if context is None else context.get(_current)
        return self._inner(loop, coroutine if user is None else _UserCoroutine(coroutine, user), **options)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **options)


@dataclass(frozen=True, slots=True)
class _Returned:
    """value: of a call on a thread, as `check` made it; or what is still to be awaited, and checked."""

    value: Any
    checked: bool


def _in_thread(
    function: Callable[[], Any], check: Callable[[Any], Any], what: str, cause: Cause
) -> _Returned | TrajectoryFailure:
    try:
        value = function()
        return _Returned(value, False) if inspect.isawaitable(value) else _Returned(check(value), True)
    except BaseException as error:  # noqa: BLE001  # no thread but the main one is ever interrupted
        return attributed(error, what, cause)


# --- what it raised ---------------------------------------------------------------------------------------------------


def is_async(function: object) -> bool:
    """Return whether calling it gives a coroutine: an `async def`, or an object whose call is one."""
    if inspect.isclass(function):
        return False
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def attributed(error: BaseException, what: str, cause: Cause) -> TrajectoryFailure:
    """Return an exception of user code as a failure: the one that it is, or one of this cause that names it."""
    if isinstance(error, TrajectoryFailure):
        try:
            return TrajectoryFailure(error.cause, error.message, error.traceback or user_traceback(error))
        except BaseException as worse:  # somebody has tampered with it
            if is_interrupt(worse):
                raise
    if isinstance(error, SystemExit | KeyboardInterrupt):
        message = f"{what} tried to exit the process ({_text(error) or type(error).__name__})"
    else:
        message = raised(what, error)
    return TrajectoryFailure(cause, message[:_LONGEST], user_traceback(error))


def raised(what: str, error: BaseException) -> str:
    """Return `WHAT raised TYPE: TEXT`, escaped for files, terminals and databases: it may hold lone surrogates."""
    return f"{what} raised {type(error).__name__}: {_text(error)}".encode(errors="backslashreplace").decode()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as worse:  # user code, too
        if is_interrupt(worse):
            raise
        return "(and its text could not be made)"
