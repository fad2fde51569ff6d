"""Python child processes that end with this one, however it ends; and memory that this one gives back."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from subprocess import PIPE, STDOUT, Popen
from typing import IO

_GRACE = 5.0  # seconds to end by itself once the other process has ended


def start_child(module: str, channel: socket.socket, output: IO[bytes]) -> Popen[bytes]:
    """Run `python -m module FD`, FD being the channel, which the child inherits. Raises OSError.

    output: where its standard output and errors go. It runs in a session of its own, so that Ctrl-C reaches only this
    process, which may need the other to finish. Its standard input is a pipe without input that closes when this
    process ends, however that happens; it must end then (`end_with_parent`). No `__main__` is imported again, so that a
    script needs no guard.
    """
    return Popen(
        [sys.executable, "-P", "-m", module, str(channel.fileno())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        stdin=PIPE,
        stdout=output,
        stderr=STDOUT,
        pass_fds=[channel.fileno()],
        start_new_session=True,
    )


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these environment variables within, here and in processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def parent_has_ended() -> bool:
    """Return whether the process that started this one has ended; it may take a tenth of a second to tell."""
    readable, _, _ = select.select([0], [], [], 0.1)  # a pipe without input: its end
    return bool(readable)


def end_with_parent(folders: Sequence[str] = ()) -> None:
    """Kill this process if it outlives the one that started it, however that one dies, by more than `_GRACE` seconds.

    That process holds the other end of standard input, which then closes. folders: of that process, removed before.
    """

    def watch() -> None:
        while os.read(0, 1024):
            pass
        time.sleep(_GRACE)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def exit_in_words(code: int) -> str:
    return f"code {code}" + (f" ({signal.strsignal(-code)})" if code < 0 else "")


_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE = 4 << 20


def release_freed_memory() -> None:
    """Return freed memory that glibc keeps to the system: sampling cannot reuse fragments that training leaves."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def return_large_blocks_when_freed() -> None:
    """Have glibc return each block of 4 MiB and more when it is freed; no-op with other C libraries.

    glibc otherwise raises that limit to 32 MiB, and smaller tensors fragment the heap: 15% of a rank's memory in an
    update that gathers and frees one layer after the other.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
