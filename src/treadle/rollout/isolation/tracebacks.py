"""Where in user code something happened: tracebacks and places without Treadle's own frames."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, extract_stack, extract_tb
from types import FrameType
from typing import Any

import treadle.core

_LINES = 60  # of a traceback, those on record
_ROOT = Path(treadle.core.__file__).parents[1]
_USERS = (f"{_ROOT}/envs/", f"{_ROOT}/recipes/")  # shipped, but written as a user would
_GLUE = f"{_ROOT}/envs/single_turn.py"  # between the run and a reward function
_OURS = tuple(f"{folder}/" for folder in (_ROOT, *asyncio.__path__, *concurrent.futures.__path__))
_LOOP = (asyncio.base_events.__file__, "run_forever")
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def user_traceback(error: BaseException) -> str:
    """Return the error's traceback, and those of its causes, from the first frame of user code on.

    Empty where no user code is in it. Of a long one the middle is left out.
    """
    found = TracebackException.from_exception(error, compact=True)
    if not any([_keep_users(each) for each in _chain(found)]):
        return ""
    lines = "".join(found.format()).rstrip("\n").split("\n")
    if len(lines) > _LINES:
        cut = len(lines) - _LINES
        lines = [*lines[: _LINES // 4], f"  ... {cut} lines left out ...", *lines[-(_LINES - _LINES // 4) :]]
    return "\n".join(lines).encode(errors="backslashreplace").decode()


def user_place(frame: FrameType | None) -> str:
    """Return `my_env.py:12 in step`: the innermost line of user code that the event loop runs on this stack.

    Lines outside of libraries come first; empty where there is no user code.
    """
    stack = extract_stack(frame) if frame is not None else []
    loops = [number for number, each in enumerate(stack) if (each.filename, each.name) == _LOOP]
    return _innermost(stack[loops[-1] :] if loops else stack)


def error_place(error: BaseException) -> str:
    """Return the line of user code that raised, as `user_place` does."""
    return _innermost(extract_tb(error.__traceback__))


def coroutine_place(coroutine: Any) -> str:
    """Return the line of user code at which a coroutine waits, as `user_place` does."""
    frames: list[FrameSummary] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames += extract_stack(frame, 1)
        coroutine = coroutine.cr_await
    return _innermost(frames)


def _innermost(stack: Sequence[FrameSummary]) -> str:
    users = [frame for frame in stack if _is_users(frame)]
    own = [frame for frame in users if not frame.filename.startswith(_LIBRARIES)] or users
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def _chain(found: TracebackException) -> Iterator[TracebackException]:
    todo = [found]
    while todo:
        each = todo.pop()
        yield each
        todo += [other for other in (each.__cause__, each.__context__, *(each.exceptions or ())) if other is not None]


def _keep_users(found: TracebackException) -> bool:
    """Drop the frames that are not user code's; return whether any is left.

    Columns are dropped, too: marking them parses the line, which CPython 3.11 cannot do in two threads at a time.
    """
    frames = [FrameSummary(frame.filename, frame.lineno, frame.name) for frame in found.stack if _is_users(frame)]
    found.stack = StackSummary.from_list(frames)
    return bool(found.stack)


def _is_users(frame: FrameSummary) -> bool:
    ours = frame.filename.startswith(_OURS) or frame.filename == threading.__file__
    return not ours or (frame.filename.startswith(_USERS) and frame.filename != _GLUE)
