"""Confined processes that execute model output for this one: its SQL, its Python expressions.

    with pool.lease() as child:         an idle child; the next one starts meanwhile
        child.ask({...}, timeout=5.0)   a line of JSON each way; a child that misses its deadline is not reused

Children restrict themselves: `envs.sql.child.confine`.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from treadle.core.errors import InfrastructureError, TreadleError
from treadle.core.text import read_json

_LARGEST_ANSWER = 2**26  # bytes


class NoAnswer(TreadleError, RuntimeError):
    """Raised if a child gives no answer."""


class LateAnswer(NoAnswer):
    """Raised if a child gives no answer in time."""


class Child:
    """A process that answers requests, possibly still starting. usable: whether it has answered all so far."""

    def __init__(self, command: Sequence[str]) -> None:
        self._channel, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
                start_new_session=True,  # shields it from Ctrl-C, as the run may still need it
            )
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._answers = self._channel.makefile("rb")
        self._ready = False
        self.pid, self.usable = self._process.pid, True

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until it accepts requests. Raises NoAnswer. timeout: seconds."""
        if not self._ready:
            self._exchange(b"", timeout)
            self._ready = True

    def ask(self, message: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Return the child's answer to a message. Raises NoAnswer. timeout: seconds."""
        return self._exchange(json.dumps(message).encode() + b"\n", timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._answers.close()
        self._channel.close()

    def _exchange(self, request: bytes, timeout: float) -> dict[str, Any]:
        self.usable = False
        self._channel.settimeout(max(timeout, 1e-3))  # 0 would not wait at all
        try:
            self._channel.sendall(request)
            line = self._answers.readline(_LARGEST_ANSWER)
        except TimeoutError as error:
            raise LateAnswer(f"no answer for {timeout:g} s") from error
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            raise NoAnswer("its process ended: out of memory, or a crash")
        try:
            answer = read_json(line.decode())
        except ValueError as error:
            raise NoAnswer(f"its process gave no answer: {error}") from error
        self.usable = isinstance(answer, dict)
        return answer if self.usable else {"error": "its process gave no answer"}


class ChildPool:
    """Concurrent children of one kind, with one idle for the next request.

    what: their purpose, for errors. children: maximum number running at once; further leases wait. start_timeout: limit
    for starting one, in seconds. Thread-safe. A child that was killed or has ended is replaced. None runs before the
    first lease or `start_spare`; all end with this process.
    """

    def __init__(self, what: str, command: Sequence[str], children: int, start_timeout: float = 30.0) -> None:
        self._what, self._command, self._start_timeout = what, command, start_timeout
        self._changed = threading.Condition()
        self._idle: list[Child] = []
        self._running: set[Child] = set()
        self._limit = children
        atexit.register(self.close)

    def start_spare(self) -> None:
        """Start an idle child if there is none, without waiting until it is ready."""
        with self._changed:
            if not self._idle and len(self._running) < self._limit:
                self._idle.append(Child(self._command))

    def close(self) -> None:
        """End idle children; busy ones end after their request."""
        with self._changed:
            self._limit, idle, self._idle = 0, self._idle, []
        for child in idle:
            child.kill()

    @contextmanager
    def lease(self) -> Iterator[Child]:
        """Lend a child for one or several consecutive requests. It is reused only if it has answered all of them.

        Raises InfrastructureError if it does not start.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._running) < max(1, self._limit))
            try:
                child = self._idle.pop() if self._idle else Child(self._command)
            except OSError as error:  # out of processes or memory
                raise InfrastructureError(f"a process for {self._what} did not start: {error}") from error
            self._running.add(child)
        try:
            with suppress(OSError):  # the next lease will retry
                self.start_spare()
            try:
                child.wait_until_ready(self._start_timeout)
            except NoAnswer as error:
                raise InfrastructureError(f"a process for {self._what} did not start: {error}") from error
            yield child
        finally:
            with self._changed:
                self._running.remove(child)
                if kept := child.usable and len(self._idle) + len(self._running) < self._limit:
                    self._idle.append(child)
                self._changed.notify()
            if not kept:
                child.kill()
