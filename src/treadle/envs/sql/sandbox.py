"""`Sandbox`: a model's SQL, run by SQLite in confined processes, each query within its time limit.

    Sandbox.select, has_same_rows
      -> ChildPool.lease   an idle child; the next one starts meanwhile
      -> Child.ask         over a pipe; a child without an answer shortly after the limit is killed
      -> child.py          SQLite

Barriers against a query, in the order in which it meets them:

    the authorizer           compiles only read operations: no ATTACH, no write, no VACUUM INTO, three PRAGMAs
    a read-only connection   the database's file is opened for reading, and its directory is never written
    SQLite's limits          values of at most 16 MB, nothing attached
    the progress handler     ends queries with too many operations
    the parent               kills single long operations: `printf('%.*c', 1e9, 'x')`, a quadratic `instr`
    rlimits                  address space, no file can grow, CPU time in case the parent is gone

It is no boundary against a code-execution bug in SQLite: such code could read this user's files and use the network.
For that, play in a container.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treadle.core.errors import Cause, TrajectoryFailure, TreadleError
from treadle.workers.confined import Child, ChildPool, LateAnswer, NoAnswer

Cell = str | int | float | None

ADDRESS_SPACE = 2**29
"""Address space of a child, in bytes."""

_GRACE = 0.15  # seconds between a query's limit and killing its child, time to interrupt it
_CHARACTERS = 10**6  # total length of the cells shown


class QueryError(TreadleError, RuntimeError):
    """Raised if a query fails, with SQLite's message."""


class QueryTimeout(QueryError):
    """Raised if a query takes too long."""


@dataclass(frozen=True, slots=True)
class Database:
    """A SQLite file, or the SQL to make a database in memory."""

    file: Path | None = None
    script: str = ""

    @property
    def uri(self) -> str:
        """URI for SQLite; `immutable` also keeps it from making files beside the database."""
        return ":memory:" if self.file is None else f"{self.file.absolute().as_uri()}?mode=ro&immutable=1"


@dataclass(frozen=True, slots=True)
class Query:
    """A query and its limits.

    seconds: limit, from when a child has it. operations: limit in operations of SQLite's virtual machine, equal on all
    machines; None: unlimited.
    """

    database: Database
    sql: str
    seconds: float
    operations: int | None = None


class Sandbox(ChildPool):
    """Runs queries in concurrent confined children. children: maximum number; a query's time begins with its turn."""

    def __init__(self, children: int) -> None:
        program = str(Path(__file__).with_name("child.py"))
        super().__init__("SQL", [sys.executable, "-I", "-S", program, str(ADDRESS_SPACE)], children)

    def select(self, query: Query, rows: int) -> list[tuple[Cell, ...]]:
        """Return the query's first `rows` distinct rows, in their original order.

        Blobs become texts, as written by Python; texts longer than 9,000 characters are shortened, and rows end after
        1,000,000 characters. Raises QueryError, QueryTimeout; TrajectoryFailure if the database cannot be opened.
        """
        with self.lease() as child:
            answer = _ask(child, "select", query, rows=rows, characters=_CHARACTERS)
        return [tuple(row) for row in answer["rows"]]

    def has_same_rows(self, query: Query, gold: str) -> bool:
        """Return whether the query and `gold` give the same set of rows; each has the query's `seconds`.

        All rows are compared, inside the child. Raises QueryError, QueryTimeout for the query; TrajectoryFailure
        (verifier) if `gold` fails, which is no fault of the query.
        """
        with self.lease() as child:
            try:
                _ask(child, "expect", replace(query, sql=gold))
            except QueryError as error:
                message = f"the reference query failed ({error}), correct or remove the task: {gold:.300}"
                raise TrajectoryFailure(Cause.VERIFIER, message) from error
            return bool(_ask(child, "compare", query)["equal"])


def _ask(child: Child, do: str, query: Query, **more: int) -> dict[str, Any]:
    """Return the child's answer. Raises QueryError; TrajectoryFailure (environment) for a missing database."""
    database = query.database
    message: dict[str, Any] = {"do": do, "uri": database.uri, "script": database.script, "sql": query.sql}
    message |= {"operations": query.operations, "seconds": query.seconds}
    try:
        answer = child.ask(message | more, query.seconds + _GRACE)
    except LateAnswer as error:
        raise QueryTimeout(str(error)) from error
    except NoAnswer as error:
        raise QueryError(str(error)) from error
    if "fault" in answer:
        where = database.file or "a task's script"
        raise TrajectoryFailure(Cause.ENVIRONMENT, f"{where} is not a database: {answer['fault']}")
    if answer.get("late"):
        limit = f"{query.seconds:g} s" if query.operations is None else f"{query.operations} operations"
        raise QueryTimeout(f"it took more than {limit}")
    if "error" in answer:
        raise QueryError(str(answer["error"]))
    return answer


SANDBOX = Sandbox(children=max(4, 2 * (os.cpu_count() or 1)))
"""This process's sandbox. No child runs before the first query."""
