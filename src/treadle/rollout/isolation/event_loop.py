"""Running an event loop that calls user code, which cannot keep the loop from ending."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from asyncio.events import Handle
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager, suppress
from contextvars import copy_context
from traceback import walk_tb
from types import FrameType
from typing import Any, TypeVar

from treadle.core.errors import RunError
from treadle.rollout.isolation import user_code
from treadle.rollout.isolation.interrupts import INTERRUPTER, Interrupt, Interrupter, handled

T = TypeVar("T")

_TO_END = 60.0  # seconds for cancelled tasks to end, as environments are being closed
_TO_END_INTERRUPTED = 1.0  # after a second Ctrl-C

# referenced forever, because asyncio complains when pending tasks are collected
_left_behind: list[asyncio.Task[Any]] = []


def run(
    main: Coroutine[Any, Any, T],
    log: Callable[[str], None],
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Run `main` on a new event loop, like asyncio.run, and return its result.

    Ctrl-C cancels `main` and raises KeyboardInterrupt; a second one raises immediately, however `main` handles the
    first (`handled`), and later ones have no effect. Cancelled tasks and threads that do not end are abandoned and
    named in `log`, unless there was no time. Raises RunError if user code stops the loop.
    """
    loop = (new_event_loop or asyncio.new_event_loop)()
    loop.set_default_executor(user_code.DaemonThreads())
    interrupter, context = Interrupter(loop), copy_context()
    context.run(INTERRUPTER.set, interrupter)
    task = loop.create_task(main, context=context)
    has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def cancel() -> None:
        # `main` handled the first one itself, and this is the second.
        if interrupter.is_asked:
            interrupter.interrupt()
        else:
            loop.call_soon_threadsafe(task.cancel)

    numbers = [signal.SIGINT] if has_default_handler else []
    with closing(loop), handled(cancel, *numbers, again=interrupter.interrupt) as asked:
        try:
            return _completed(loop, task, interrupter, log)
        finally:
            _end(loop, interrupter, log)
            interrupter.over.set()
            if interrupter.interrupts or (asked and task.cancelled()):
                raise Interrupt from None


@contextmanager
def paused_event_loop() -> Iterator[None]:
    """Allow another event loop on this thread inside one that is already running (notebooks run cells on one).

    The caller must block until the end: the running loop waits for it. On the main thread, signals reach the inner code
    as they would without the outer loop.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task()
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)


def _completed(
    loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], interrupter: Interrupter, log: Callable[[str], None]
) -> T:
    task.add_done_callback(lambda _: loop.stop())
    while not task.done():
        stopped = _run_until_stopped(loop, task, log)
        if interrupter.interrupts and not task.done():
            raise Interrupt
        if stopped and not task.done():
            raise RunError("an environment, agent or callback stopped the event loop; remove its loop.stop()")
    return task.result()


def _run_until_stopped(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], log: Callable[[str], None]) -> bool:
    """Run the loop until it is stopped, or return False if something other than `task` raised and ended it (logged)."""
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt) as error:
        # From a task or callback started by user code.
        if isinstance(error, Interrupt):
            raise
        if not task.done():
            place = user_code.user_place([frame for frame, _ in walk_tb(error.__traceback__)][::-1])
            log(f"a task or callback tried to exit the process ({error!r:.100}), at {place}: only what awaits it fails")
        return False
    return True


def _end(loop: asyncio.AbstractEventLoop, interrupter: Interrupter, log: Callable[[str], None]) -> None:
    """End all tasks; after an interrupt, within a second and without reporting what that breaks."""
    while True:
        interrupts = interrupter.interrupts
        if interrupts:
            loop.set_exception_handler(lambda *_: None)
            log = _ignore
        # Before any of them gets its next turn.
        for task in asyncio.all_tasks(loop):
            task.cancel()
        ending = loop.create_task(_end_tasks(log, _TO_END_INTERRUPTED if interrupts else _TO_END))
        ending.add_done_callback(lambda _: loop.stop())
        while not ending.done() and interrupter.interrupts is interrupts:
            with suppress(Interrupt):
                _run_until_stopped(loop, ending, log)
        if ending.done():
            return None if ending.cancelled() else ending.result()


def _ignore(line: str) -> None: ...


async def _end_tasks(log: Callable[[str], None], seconds: float) -> None:
    """Wait for cancelled tasks to end, except for calls that ignored an earlier cancellation."""
    this, loop = asyncio.current_task(), asyncio.get_running_loop()
    if tasks := asyncio.all_tasks() - {this} - user_code.abandoned_tasks:
        await asyncio.wait(tasks, timeout=seconds)
    await asyncio.wait({loop.create_task(loop.shutdown_asyncgens())}, timeout=seconds)
    if tasks := asyncio.all_tasks() - {this}:
        _left_behind.extend(tasks)
        log(f"cancelled, but does not end, and is left behind: {', '.join(sorted(t.get_name() for t in tasks)):.500}")
    if threads := user_code.abandoned_threads():
        log(f"has not returned, and its thread is left behind: {', '.join(sorted(t.name for t in threads)):.500}")


BLOCKED = 1.0  # seconds without an answer until the loop counts as blocked
_PERIOD = 0.1  # seconds between probes
_WARNINGS = 20  # at most


@contextmanager
def watched_event_loop(log: Callable[[str], None]) -> Iterator[None]:
    """Watch the running event loop, and warn while user code blocks it.

    A thread probes the loop every tenth of a second. After a second without an answer, it inspects the loop's stack and
    names the attempt of the running user code and the line, unless that line awaits a library, or another turn of a
    task is running at the next check. log: called from that thread, once for each blocking line.
    """
    watch, over = _Watch(log), threading.Event()
    thread = threading.Thread(target=watch.run, args=(over,), name="treadle-loop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Watch:
    def __init__(self, log: Callable[[str], None]) -> None:
        self._log, self._logged = log, set[tuple[str, str]]()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._answered, self._asked = time.monotonic(), False
        self._blocking: user_code.UserCode | None = None
        self._turn: Handle | None = None  # turn running at the last check

    def run(self, over: threading.Event) -> None:
        while not over.wait(_PERIOD):
            if not self._asked:
                self._asked = True
                # The loop was closed: an interrupted run does not wait for this thread.
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._answer)
            elif self._blocking is None and time.monotonic() - self._answered >= BLOCKED:
                self._warn()

    def _answer(self) -> None:
        now = time.monotonic()
        if self._blocking is not None:
            self._blocking.blocked_seconds += now - self._answered
        self._answered, self._asked, self._blocking = now, False, None

    def _warn(self) -> None:
        frames, user, turn = list[FrameType](), None, None
        for frame in user_code.thread_frames(self._thread):
            # Runs a callback of the loop: a turn of a task, in its context.
            if frame.f_code is Handle._run.__code__:
                turn = frame.f_locals["self"]
                user = turn._context.get(user_code.RUNNING)
                break
            frames.append(frame)
        lasts, self._turn = turn is self._turn, turn
        place = user_code.blocking_place(frames)
        if user is None or not place or not lasts or not self._asked:
            return
        self._blocking = user
        if (user.name, place) not in self._logged and len(self._logged) < _WARNINGS:
            self._logged.add((user.name, place))
            self._log(
                f"{user.name} blocks the event loop, at {place} ({user.attempt}): nothing else runs meanwhile. "
                "Methods that are not async run in a thread and block nothing"
            )
