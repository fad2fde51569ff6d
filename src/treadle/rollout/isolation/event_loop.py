"""Running an event loop that plays user code, which can neither end it nor keep it from ending."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from treadle.core.errors import TrajectoryFailure
from treadle.rollout.isolation.interrupts import Interrupt, InterruptHandler, is_interrupt
from treadle.rollout.isolation.threads import DaemonThreads, abandoned_threads
from treadle.rollout.isolation.tracebacks import coroutine_place, error_place, user_place
from treadle.rollout.isolation.user_code import current_user_code, raised, user_code_of

T = TypeVar("T")

_GRACE = 5.0  # seconds that tasks of user code have to end once they are cancelled

_left_behind: list[asyncio.Task[Any]] = []  # tasks that did not end; held, as collecting them would run their code


def run(
    main: Coroutine[Any, Any, T],
    log: Callable[[str], None],
    on_culprit: Callable[[str], None] | None = None,
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Run `main` as asyncio.run does, on a new event loop, and return its result.

    Where user code stops the loop, or tries to exit the process in a callback, the loop goes on, and `on_culprit`
    (default: `log`) gets a line that names the culprit. `log` gets a line for each error in a task of user code that
    nobody awaits, and for tasks that do not end when they are cancelled at the end, which are left behind. Raises
    KeyboardInterrupt after a Ctrl-C, which cancels `main`; after a second one, all tasks have a few seconds to end.
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        loop = runner.get_loop()
        loop.set_default_executor(DaemonThreads())
        loop.set_exception_handler(_UnawaitedErrors(log))
        stops = _Stops(loop)
        task = loop.create_task(main)
        with _cancelled_by_interrupt(task) as handler:
            interrupted = False
            try:
                while True:
                    try:
                        return loop.run_until_complete(task)
                    except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
                        culprit = stops.culprit if isinstance(error, RuntimeError) else _exiting(error)
                        if task.done() or culprit is None or is_interrupt(error):
                            raise
                        stops.culprit = None
                        (on_culprit or log)(culprit)
            except asyncio.CancelledError:
                if handler is not None and handler.asked:
                    raise Interrupt from None
                raise
            except KeyboardInterrupt:  # in the middle of any task, which others may wait for
                interrupted = True
                raise
            finally:
                loop.run_until_complete(_end_others(log, interrupted))
                _name_abandoned_threads(log)


@contextmanager
def _cancelled_by_interrupt(task: asyncio.Task[Any]) -> Iterator[InterruptHandler | None]:
    """The first Ctrl-C cancels the task, a later one raises at once; none is handled where asyncio.run would not."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if not on_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield None
        return
    loop = task.get_loop()

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)  # wakes the loop up

    handler = InterruptHandler(cancel)
    signal.signal(signal.SIGINT, handler)
    try:
        yield handler
    finally:
        handler.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Stops:
    """Records which code calls the loop's `stop`. culprit: the last caller, in words."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.culprit: str | None = None
        self._stop = loop.stop
        loop.stop = self._note  # type: ignore[method-assign]

    def _note(self) -> None:
        user, place = current_user_code(), user_place(sys._getframe(1))
        who = "something" if user is None else f"{user.name} ({user.attempt})"
        self.culprit = f"{who} stopped the event loop" + (f", at {place}" if place else "")
        self._stop()


class _UnawaitedErrors:
    """Handles errors that nobody awaits; one of user code is reported once for each line that raises it."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._logged = log, set[tuple[str, str]]()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        task, error = context.get("task") or context.get("future"), context.get("exception")
        if isinstance(error, Interrupt):  # it ended the loop, too, and `run` raises it
            return
        user = user_code_of(task) if isinstance(task, asyncio.Task) else None
        if user is None or error is None:
            loop.default_exception_handler(context)
            return
        where = user.name, error_place(error)
        if isinstance(error, TrajectoryFailure) or where in self._logged:  # the former is its attempt's
            return
        self._logged.add(where)
        what = raised(f"a task that {user.name} did not wait for", error)
        self._log(f"{what}, at {where[1]} ({user.attempt})")


def _exiting(error: BaseException) -> str:
    place = error_place(error)
    return f"a callback tried to exit the process ({error!r:.100})" + (f", at {place}" if place else "")


async def _end_others(log: Callable[[str], None], interrupted: bool) -> None:
    """Cancel all other tasks, and wait for them: for user code's, and if interrupted for all, a few seconds only."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    others = asyncio.all_tasks() - {this}
    for task in others:
        task.cancel()
    own = {task for task in others if user_code_of(task) is None}
    if own:
        await asyncio.wait(own, timeout=_GRACE / 2 if interrupted else None)
    for task in own:
        error = task.exception() if task.done() and not task.cancelled() else None
        if error is not None and not interrupted:  # else it may be of the interrupt's making
            loop.call_exception_handler({"message": "exception while ending", "exception": error, "task": task})
    generators = loop.create_task(loop.shutdown_asyncgens())
    await asyncio.wait(asyncio.all_tasks() - {this}, timeout=_GRACE)
    left = asyncio.all_tasks() - {this}
    for who, count in Counter(map(_who, left - {generators})).items():
        log(f"{who} does not end when it is cancelled, and is left behind" + (f" ({count} times)" if count > 1 else ""))
    for task in left:
        asyncio._unregister_task(task)  # so that nobody waits for it
        _left_behind.append(task)


def _name_abandoned_threads(log: Callable[[str], None]) -> None:
    stuck = [(user_place(sys._current_frames().get(thread.ident or 0)), thread.name) for thread in abandoned_threads()]
    for place, count in Counter(place for place, _ in stuck).items():
        name = next(name for where, name in stuck if where == place)
        who = f"{name}, at {place}," if place else name
        log(f"{who} has not returned, and its thread is left behind" + (f" ({count} threads)" if count > 1 else ""))


def _who(task: asyncio.Task[Any]) -> str:
    user = user_code_of(task)
    place = coroutine_place(task.get_coro())
    return (repr(task) if user is None else user.name) + (f", at {place}," if place else "")
