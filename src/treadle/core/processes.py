"""Python child processes that never outlive their parent, and returning freed memory to the system."""

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

_GRACE = 5.0  # seconds to exit after the parent has ended


def start_child(module: str, channel: socket.socket, output: IO[bytes]) -> Popen[bytes]:
    """Run `python -m module FD`, FD being the channel, which the child inherits. Raises OSError.

    output: file for its standard output and errors. The child runs in its own session, so that Ctrl-C reaches only this
    process, which may need the child to finish. Its standard input is an empty pipe that closes when this process ends,
    however that happens; the child must then exit (`end_with_parent`). `__main__` is not imported again, so scripts
    need no guard.
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
    """Set environment variables inside the block, for this process and for processes started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def parent_has_ended() -> bool:
    """Return whether the parent process has ended; may block for 0.1 seconds."""
    readable, _, _ = select.select([0], [], [], 0.1)  # a pipe without input: its end
    return bool(readable)


def end_with_parent(folders: Sequence[str] = ()) -> None:
    """Kill this process if it outlives its parent by more than `_GRACE` seconds, however the parent dies.

    The parent holds the other end of standard input, which closes when it ends. folders: directories of the parent to
    remove first.
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


def release_freed_memory() -> None:
    """Return glibc's freed memory to the system: sampling cannot reuse fragments left by training."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def return_large_blocks_when_freed() -> None:
    """Have glibc return each block of 4 MiB or more when it is freed; no-op with other C libraries.

    By default glibc raises that limit to 32 MiB, and smaller tensors fragment the heap: 15% of a rank's memory in an
    update that gathers and frees one layer at a time.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(-3, 4 << 20)  # M_MMAP_THRESHOLD of malloc.h
