"""`Sandbox`: SQL of a model, run by SQLite in confined processes, each query within its time.

    Sandbox.select, has_same_rows
      -> _lease          a child that waits; the next one starts meanwhile
      -> Child.request   over a pipe; a child that has not answered a moment after the limit is killed
      -> child.py        SQLite

What holds a query, in the order in which it meets them:

    the authorizer           compiles only what reads: no ATTACH, no write, no VACUUM INTO, three PRAGMAs
    a read-only connection   the database's file is opened for reading, and its directory is never written
    SQLite's limits          a value of 16 MB at most, nothing attached
    the progress handler     ends what takes too many operations
    the parent               kills what is one long operation: `printf('%.*c', 1e9, 'x')`, a quadratic `instr`
    rlimits                  address space, no file can grow, CPU time should the parent be gone

It is no boundary against a bug of SQLite's that runs code: such code would have this user's rights to read files and to
use the network. For that, play in a container.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treadle.core.errors import Cause, TrajectoryFailure, TreadleError
from treadle.core.untrusted_json import read_json

Cell = str | int | float | None

ADDRESS_SPACE = 2**29
"""Bytes of address space that a child may have."""

_GRACE = 0.15  # seconds after its limit that a query has to be interrupted, before its child is killed
_START = 30.0  # seconds in which a child must be ready
_LARGEST_ANSWER = 2**26  # bytes
_CHARACTERS = 10**6  # of cells in the rows that are shown


class QueryError(TreadleError, RuntimeError):
    """Says that a query failed, in SQLite's words."""


class QueryTimeout(QueryError):
    """Says that a query was not done when its time was over."""


@dataclass(frozen=True, slots=True)
class Database:
    """Names a SQLite file, or holds the SQL that makes a database in memory."""

    file: Path | None = None
    script: str = ""

    @property
    def uri(self) -> str:
        """Return the name by which SQLite opens it; `immutable` also keeps it from making files beside the database."""
        return ":memory:" if self.file is None else f"{self.file.absolute().as_uri()}?mode=ro&immutable=1"


@dataclass(frozen=True, slots=True)
class Query:
    """Says what runs where, and for how long at most. seconds: from when a child has it."""

    database: Database
    sql: str
    seconds: float


class Child:
    """Holds one process that runs queries, and the pipes to it. It may still be starting.

    usable: it has answered all that it was asked.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("child.py")), str(ADDRESS_SPACE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"},
            start_new_session=True,  # Ctrl-C is for the run, which may still need it
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._unread = b""
        self._ready = False
        self.usable = True

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Wait until it takes requests. Raises TrajectoryFailure (infrastructure)."""
        if self._ready:
            return
        try:
            self._answer(_START)
        except QueryError as error:
            message = f"a process for SQL did not start: {error}"
            raise TrajectoryFailure(Cause.INFRASTRUCTURE, message) from error
        self._ready = True

    def request(self, do: str, query: Query, **more: int) -> dict[str, Any]:
        """Let the child do something with a query and return its answer.

        Raises QueryError, QueryTimeout; TrajectoryFailure (environment) where the database cannot be opened.
        """
        database = query.database
        message = {"do": do, "uri": database.uri, "script": database.script, "sql": query.sql, "seconds": query.seconds}
        self._send(message | more)
        answer = self._answer(query.seconds + _GRACE)
        if "fault" in answer:
            where = database.file or "a task's script"
            raise TrajectoryFailure(Cause.ENVIRONMENT, f"{where} is no database: {answer['fault']}")
        if answer.get("late"):
            raise QueryTimeout(f"it took more than {query.seconds:g} s")
        if "error" in answer:
            raise QueryError(str(answer["error"]))
        return answer

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._output.close()
        with suppress(BrokenPipeError):
            self._input.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self.usable = False
        with suppress(BrokenPipeError):  # it has ended, as the missing answer will show
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    def _answer(self, timeout: float) -> dict[str, Any]:
        """Return its next answer. Raises QueryTimeout; QueryError if it ends before."""
        self.usable = False
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise QueryTimeout(f"no answer for {timeout:g} s")
            chunk = os.read(self._output.fileno(), 2**20)
            if not chunk or len(self._unread) > _LARGEST_ANSWER:
                raise QueryError("its process ended: out of memory, or a crash")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = read_json(line.decode())
        except ValueError as error:
            raise QueryError(f"its process gave no answer: {error}") from error
        self.usable = isinstance(answer, dict)
        return answer if self.usable else {"error": "its process gave no answer"}


class Sandbox:
    """Runs queries in confined children, side by side, and keeps one that waits for the next.

    children: most that run at once; a further query waits for its turn, before its time begins. Any thread may call. A
    child that was killed, or has ended, is replaced.
    """

    def __init__(self, children: int) -> None:
        self._changed = threading.Condition()
        self._idle: list[Child] = []
        self._running: set[Child] = set()
        self._most = children

    def select(self, query: Query, rows: int) -> list[tuple[Cell, ...]]:
        """Return the query's distinct rows in the order in which they come, the first `rows` of them.

        Blobs are texts, as Python writes them; a text of more than 9,000 characters is cut, rows end after 1,000,000
        characters. Raises QueryError, QueryTimeout; TrajectoryFailure where the database cannot be opened.
        """
        with self._lease() as child:
            answer = child.request("select", query, rows=rows, characters=_CHARACTERS)
        return [tuple(row) for row in answer["rows"]]

    def has_same_rows(self, query: Query, gold: str) -> bool:
        """Return whether the query and `gold` give the same set of rows; each has the query's `seconds`.

        All rows are compared, and where they are: in the child. Raises QueryError, QueryTimeout for the query;
        TrajectoryFailure (verifier) where `gold` fails, which says nothing about the query.
        """
        with self._lease() as child:
            try:
                child.request("expect", replace(query, sql=gold))
            except QueryError as error:
                message = f"the reference query failed ({error}), correct or remove the task: {gold:.300}"
                raise TrajectoryFailure(Cause.VERIFIER, message) from error
            return bool(child.request("compare", query)["equal"])

    def start_spare(self) -> None:
        """Start a child if none waits, without waiting until it is ready."""
        with self._changed:
            if not self._idle and len(self._running) < self._most:
                self._idle.append(Child())

    def close(self) -> None:
        """End the children that wait; one that runs ends with its query."""
        with self._changed:
            self._most, idle, self._idle = 0, self._idle, []
        for child in idle:
            child.kill()

    @contextmanager
    def _lease(self) -> Iterator[Child]:
        """Give a child for a request, or several in a row. It is not used again unless it has answered all of them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._running) < max(1, self._most))
            child = self._idle.pop() if self._idle else Child()
            self._running.add(child)
        self.start_spare()
        try:
            child.wait_until_ready()
            yield child
        finally:
            with self._changed:
                self._running.remove(child)
                if kept := child.usable and len(self._idle) + len(self._running) < self._most:
                    self._idle.append(child)
                self._changed.notify()
            if not kept:
                child.kill()


SANDBOX = Sandbox(children=max(4, 2 * (os.cpu_count() or 1)))
"""The one of this process. No child runs before the first query."""
atexit.register(SANDBOX.close)
