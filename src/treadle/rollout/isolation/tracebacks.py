"""Tracebacks of user code, without the frames of Treadle and asyncio."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException
from types import FrameType
from typing import Any

import treadle.core

_FRAMES = 20  # the innermost ones are shown
_ROOT = Path(treadle.core.__file__).parents[1]
_USERS = (f"{_ROOT}/envs/", f"{_ROOT}/recipes/")  # shipped, but written as a user would
_GLUE = f"{_ROOT}/envs/single_turn.py"  # between the run and a reward function
_OURS = (*(f"{folder}/" for folder in (_ROOT, *asyncio.__path__, *concurrent.futures.__path__)), threading.__file__)
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error and its causes: the innermost user frames, or "" if there are none.

    Columns are dropped: CPython 3.11 cannot mark them in two threads at a time.
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
    return "".join(shown.format()).rstrip("\n").encode(errors="backslashreplace").decode()


def user_place(frames: Iterable[FrameType]) -> str:
    """Return the innermost line of user code: "my_env.py:12 in step", or "". Lines outside of libraries come first.

    frames: innermost first.
    """
    users = [frame for frame in frames if _is_users(frame.f_code.co_filename)]
    for frame in [*(f for f in users if not f.f_code.co_filename.startswith(_LIBRARIES)), *users]:
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def thread_frames(thread: int | None) -> Iterator[FrameType]:
    """Yield the frames of a running thread, innermost first."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def coroutine_frames(coroutine: Any) -> list[FrameType]:
    """Return the frames of a coroutine that waits, innermost first."""
    frames: list[FrameType] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(frame)
        coroutine = coroutine.cr_await
    return frames[::-1]


def _is_users(file: str) -> bool:
    return not file.startswith(_OURS) or (file.startswith(_USERS) and file != _GLUE)
