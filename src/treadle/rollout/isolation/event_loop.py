"""Running an event loop on which user code is called: user code cannot keep it from ending."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import closing
from traceback import walk_tb
from typing import Any, TypeVar

from treadle.core.errors import RunError
from treadle.rollout.isolation.interrupts import Interrupt, handled
from treadle.rollout.isolation.threads import DaemonThreads, abandoned_threads
from treadle.rollout.isolation.tracebacks import user_place
from treadle.rollout.isolation.user_code import abandoned_tasks

T = TypeVar("T")

_TO_END = 60.0  # seconds that cancelled tasks have to end: environments are being closed
_TO_END_INTERRUPTED = 5.0  # after a second Ctrl-C

_left_behind: list[asyncio.Task[Any]] = []  # referenced forever: asyncio complains of pending tasks that are collected


def run(
    main: Coroutine[Any, Any, T],
    log: Callable[[str], None],
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Run `main` on a new event loop, like asyncio.run, and return its result.

    Ctrl-C cancels `main` and raises KeyboardInterrupt; a second one interrupts it at once. Cancelled tasks and threads
    that do not end are left behind, and `log` names them. Raises RunError if user code stops the loop.
    """
    loop = (new_event_loop or asyncio.new_event_loop)()
    loop.set_default_executor(DaemonThreads())
    task, seconds = loop.create_task(main), _TO_END
    has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)

    with closing(loop), handled(cancel, *([signal.SIGINT] if has_default_handler else [])) as handler:
        try:
            return _completed(loop, task, log)
        except asyncio.CancelledError:
            if handler.asked:
                raise Interrupt from None
            raise
        except KeyboardInterrupt:
            seconds = _TO_END_INTERRUPTED
            loop.set_exception_handler(lambda *_: None)  # tasks fail for what it broke
            raise
        finally:
            _completed(loop, loop.create_task(_end_tasks(log, seconds)), log)


def _completed(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T], log: Callable[[str], None]) -> T:
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as error:  # of a task or callback that user code started
            if isinstance(error, Interrupt) or task.done():
                raise
            place = user_place([frame for frame, _ in walk_tb(error.__traceback__)][::-1])
            log(f"a task or callback tried to exit the process ({error!r:.100}), at {place}: only what awaits it fails")
        except RuntimeError as error:
            if task.done() or "stopped before" not in str(error):
                raise
            raise RunError("an environment, agent or callback stopped the event loop; remove its loop.stop()") from None


async def _end_tasks(log: Callable[[str], None], seconds: float) -> None:
    """Cancel all tasks and wait for them to end, except for calls that were already cancelled and did not."""
    this, loop = asyncio.current_task(), asyncio.get_running_loop()
    for task in asyncio.all_tasks() - {this}:
        task.cancel()
    if tasks := asyncio.all_tasks() - {this} - abandoned_tasks():
        await asyncio.wait(tasks, timeout=seconds)
    await asyncio.wait({loop.create_task(loop.shutdown_asyncgens())}, timeout=seconds)
    if tasks := asyncio.all_tasks() - {this}:
        _left_behind.extend(tasks)
        log(f"cancelled, but does not end, and is left behind: {', '.join(sorted(t.get_name() for t in tasks)):.500}")
    if threads := abandoned_threads():
        log(f"has not returned, and its thread is left behind: {', '.join(sorted(t.name for t in threads)):.500}")
