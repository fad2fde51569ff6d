"""User code (environments, agents, hooks), called with a time limit and attributed failures.

UserCode.call -> a task -> async functions
                   └────── other functions, on the attempt's thread
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import sys
import sysconfig
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from traceback import FrameSummary, StackSummary, TracebackException
from types import FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import treadle.core
from treadle.core.errors import Cause, TrajectoryFailure, failure_in
from treadle.core.metrics import Measures
from treadle.core.text import redacted
from treadle.rollout.isolation.interrupts import Interrupt

if TYPE_CHECKING:
    from treadle.rollout.other_models import AttemptModels

T = TypeVar("T")

P = ParamSpec("P")

MAX_ABANDONED = 64  # threads stuck in calls that never return; attempts that need another one fail
_LONGEST = 2000  # characters of a failure's message
# code running in a task or callback
RUNNING: ContextVar[UserCode | None] = ContextVar("treadle_user_code", default=None)

abandoned_tasks: set[asyncio.Task[Any]] = set()  # calls that were cancelled and have not ended


class UserCode:
    """Calls the user code of one attempt.

    name: "environment 'lookup'". cause: cause of its failures. attempt: "task 7, trajectory g000003.1".
    models: models beside the policy that it may call; None if the recipe names none. blocked_seconds: time that it
    blocked the event loop, a second or longer at a time. measured: trajectory metrics added by helpers such as judges.
    """

    def __init__(self, name: str, cause: Cause, attempt: str = "") -> None:
        self.name, self.cause, self.attempt = name, cause, attempt
        self.models: AttemptModels | None = None
        self.blocked_seconds = 0.0
        self.measured = Measures()
        self.thread: CallThread | None = None

    async def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        what: str,
        timeout: float,
        check: Callable[[Any], T | Awaitable[T]] = lambda value: value,
        cause: Cause | None = None,
        grace: float = 0.0,
        in_thread: bool | None = None,
    ) -> T:
        """Call the function for at most `timeout` seconds, and return its result passed through `check`.

        Any error of the function or `check`, which may be `async`, becomes a TrajectoryFailure of this cause (default:
        `self.cause`); a TrajectoryFailure keeps its own. At the time limit, the call is cancelled and fails with cause
        timeout; a thread cannot be cancelled, and is abandoned.

        what: description of the call, for messages. grace: seconds for cleaning up after the time limit. in_thread:
        whether to call it on the attempt's thread; default: unless it is `async`.
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
                place = user_place(
                    coroutine_frames(task.get_coro()) if thread is None else thread_frames(thread.thread.ident)
                )
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
    function: Callable[[], Any],
    check: Callable[[Any], T | Awaitable[T]],
    what: str,
    cause: Cause,
    thread: CallThread | None,
) -> T | TrajectoryFailure:
    try:
        if thread is None:
            value = function()
        else:
            value = await asyncio.get_running_loop().run_in_executor(thread, copy_context().run, function)
        checked = check(await value if inspect.isawaitable(value) else value)
        return await checked if isinstance(checked, Awaitable) else checked
    except BaseException as error:
        # SystemExit raised in a task would end the event loop.
        if isinstance(error, Interrupt):
            raise
        return attributed(error, what, cause)


def _cancel(task: asyncio.Task[Any], thread: CallThread | None) -> None:
    """Cancel the task, and keep a reference to it until it ends."""
    if not task.done():
        task.cancel()
        abandoned_tasks.add(task)
        task.add_done_callback(abandoned_tasks.discard)
        if thread is not None:
            _stuck.add(thread)


def is_async(function: object) -> bool:
    """Return whether calling it returns a coroutine: an `async def`, or an object with an async `__call__`."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return not inspect.isclass(function) and any(map(inspect.iscoroutinefunction, (function, call)))


def attributed(error: BaseException, what: str, cause: Cause) -> TrajectoryFailure:
    """Return a failure of this cause for an exception; a TrajectoryFailure keeps its own cause, also in a group."""
    try:
        if (failed := failure_in(error)) is not None:
            return TrajectoryFailure(failed.cause, failed.message, failed.traceback or user_traceback(error))
    except BaseException as worse:  # tampered with by user code
        if isinstance(worse, Interrupt):
            raise
    exits = isinstance(error, SystemExit | KeyboardInterrupt)
    exiting = f"{what} tried to exit the process ({_text(error) or type(error).__name__})"
    failure = TrajectoryFailure(cause, (exiting if exits else raised(what, error))[:_LONGEST], user_traceback(error))
    failure.__cause__ = error
    return failure


def raised(what: str, error: BaseException) -> str:
    """Return `WHAT raised TYPE: TEXT`, without keys in the text, and with lone surrogates escaped."""
    return redacted(f"{what} raised {type(error).__name__}: {_text(error)}".encode(errors="backslashreplace").decode())


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as worse:  # also runs user code
        if isinstance(worse, Interrupt):
            raise
        return "(and its text could not be made)"


_stuck: set[CallThread] = set()


class CallThread(Executor):
    """Runs calls in order on one thread, as SQLite connections and browsers require.

    is_abandoned: whether the call in progress is no longer awaited. Calls queued behind it run once it returns.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put(partial(_run_call, future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        self._calls.put(None)

    @property
    def is_abandoned(self) -> bool:
        return self in _stuck

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        _stuck.discard(self)


def abandoned_threads() -> list[threading.Thread]:
    """Return the threads stuck in abandoned calls."""
    return [each.thread for each in list(_stuck)]


class DaemonThreads(ThreadPoolExecutor):
    """Default executor of an event loop: one daemon thread per call (`asyncio.to_thread`).

    The standard one shares a few threads and joins them on exit: calls that never return would block both.
    """

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        thread = CallThread("treadle-to-thread")
        future = thread.submit(function, *args, **kwargs)
        thread.shutdown()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        return None


def _run_call(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except StopIteration as error:
        # An asyncio future cannot hold it: its caller would wait forever.
        future.set_exception(RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__))
    except BaseException as error:  # noqa: BLE001  # reraised where the result is awaited
        future.set_exception(error)
    else:
        future.set_result(result)


_FRAMES = 20  # number of innermost frames shown
_ROOT = Path(treadle.core.__file__).parents[1]
_USERS = (f"{_ROOT}/envs/", f"{_ROOT}/recipes/")  # shipped, but written like user code
_GLUE = f"{_ROOT}/envs/tasks.py"  # sits between the run and a reward function
_OURS = (*(f"{folder}/" for folder in (_ROOT, *asyncio.__path__, *concurrent.futures.__path__)), threading.__file__)
_AWAITED = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_ITERABLE_COROUTINE
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error and its causes: the innermost user frames, or "" if there are none.

    Columns are dropped: CPython 3.11 cannot mark them in two threads concurrently.
    """
    shown = TracebackException.from_exception(error, compact=True)
    chain: list[TracebackException | None] = [shown]
    for each in chain:
        if each is not None:
            users = [frame for frame in each.stack if _is_users(frame.filename)]
            each.stack = StackSummary.from_list([FrameSummary(f.filename, f.lineno, f.name) for f in users[-_FRAMES:]])
            chain += (each.__cause__, each.__context__, *(each.exceptions or ()))
    if not any(each.stack for each in chain if each is not None):
        return ""
    return redacted("".join(shown.format()).rstrip("\n").encode(errors="backslashreplace").decode())


def user_place(frames: Iterable[FrameType]) -> str:
    """Return the innermost line of user code: "my_env.py:12 in step", or "". Lines outside libraries take precedence.

    frames: innermost first.
    """
    users = [frame for frame in frames if _is_users(frame.f_code.co_filename)]
    for frame in [*(f for f in users if not f.f_code.co_filename.startswith(_LIBRARIES)), *users]:
        return _place(frame)
    return ""


def blocking_place(frames: Sequence[FrameType]) -> str:
    """Return the innermost line of user code outside libraries, or "" if it awaits the library that is running.

    frames: frames of a thread, innermost first. `time.sleep(9)` and `requests.get(url)` block; for `await
    client.get(url)`, the library is responsible for its computing time.
    """
    for number, frame in enumerate(frames):
        file = frame.f_code.co_filename
        if _is_users(file) and not file.startswith(_LIBRARIES):
            awaits = number > 0 and frames[number - 1].f_code.co_flags & _AWAITED
            return "" if awaits else _place(frame)
    return ""


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def thread_frames(thread: int | None) -> Iterator[FrameType]:
    """Yield the frames of a running thread, innermost first."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def coroutine_frames(coroutine: Any) -> list[FrameType]:
    """Return the frames of a waiting coroutine, innermost first."""
    frames: list[FrameType] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(frame)
        coroutine = coroutine.cr_await
    return frames[::-1]


def _is_users(file: str) -> bool:
    return not file.startswith((*_OURS, "<frozen ")) or (file.startswith(_USERS) and file != _GLUE)
