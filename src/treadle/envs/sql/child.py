"""`python child.py BYTES`: runs queries for `sandbox`, one at a time, confined to just that.

Standard input: requests, a line of JSON each. Standard output: `{}` once it is ready, then an answer to each.

    {"do": "select", "uri": "file:///a/b.sqlite?mode=ro", "script": "", "sql": ..., "operations": null,
     "seconds": 5, "rows": 4501, "characters": 1000000}
        -> {"rows": [[...], ...]}        the distinct rows in their original order, at most as many as requested
    {"do": "expect", "uri": ":memory:", "script": "CREATE TABLE ...", "sql": ..., "operations": 1000000,
     "seconds": 30}
        -> {"count": 12}                 number of distinct rows, which are kept for `compare`
    {"do": "compare", ...}
        -> {"equal": true}               whether the query gives the expected rows, as sets
    {"error": "no such table: t"}        instead of any of these: SQLite's message; `"late": true` after a timeout
    {"fault": "unable to open ..."}      the database is to blame, not the query

Uses only the standard library, to start in little more time than Python itself.
"""

import json
import resource
import sqlite3
import sys
import time
from collections.abc import Iterator
from math import ceil, inf
from typing import Any, NamedTuple

_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_PRAGMAS = {"table_info", "foreign_key_list", "index_list"}
_FUNCTIONS_REFUSED = {"load_extension", "fts3_tokenizer"}
_OPERATIONS = 1000  # of SQLite's virtual machine, between checks of the budget
_LARGEST_VALUE = 2**24  # bytes of a text, a blob or a row
_LONGEST_CELL = 9000  # characters shown of a cell; tables of such length are cut to 50 rows anyway
_SPARE_CPU = 2  # seconds beyond a query's limit until the kernel ends this process, unless its parent did

Row = tuple[Any, ...]


class Budget:
    """Ends a query after a number of operations of SQLite's virtual machine, or of seconds."""

    def __init__(self, operations: int | None, seconds: float) -> None:
        self._operations = inf if operations is None else operations
        self._deadline = time.monotonic() + seconds

    def spend(self) -> bool:
        """Progress handler of SQLite: count operations and return whether to end the query."""
        self._operations -= _OPERATIONS
        return self.is_spent

    @property
    def is_spent(self) -> bool:
        return self._operations <= 0 or time.monotonic() >= self._deadline


class Query(NamedTuple):
    """A query. script: SQL to run first, to make a database in memory."""

    uri: str
    script: str
    sql: str
    budget: Budget


def main(address_space: int) -> None:
    """Confine this process and answer requests until standard input ends. address_space: limit in bytes."""
    confine(address_space)
    expected: set[Row] = set()
    send({})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        budget = Budget(request["operations"], request["seconds"])
        query = Query(request["uri"], request["script"], request["sql"], budget)
        limit_cpu(request["seconds"])
        try:
            if request["do"] == "select":
                answer: dict[str, Any] = {"rows": select(query, request["rows"], request["characters"])}
            elif request["do"] == "expect":
                expected = set(rows_of(query))
                answer = {"count": len(expected)}
            else:
                answer = {"equal": is_equal(query, expected)}
        except DatabaseFault as error:
            answer = {"fault": str(error)}
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            answer = {"error": str(error), "late": budget.is_spent}
        send(answer)


def send(answer: dict[str, Any]) -> None:
    """Write an answer in ASCII: lone surrogates are escaped."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class DatabaseFault(Exception):
    """Raised if the database cannot be opened or made."""


def confine(address_space: int) -> None:
    """Drop resources that queries do not need: memory, writable files, other processes, core dumps."""
    for limit, value in {
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 16,
    }.items():
        resource.setrlimit(limit, (value, value))


def limit_cpu(seconds: float) -> None:
    """Have the kernel end this process if the query runs far beyond its limit, in case the parent is gone."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit = ceil(usage.ru_utime + usage.ru_stime + seconds + _SPARE_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def select(query: Query, limit: int, characters: int) -> list[list[Any]]:
    """Return the first distinct rows as JSON data: at most `limit` rows and `characters` characters in total."""
    rows: dict[Row, None] = {}
    size = 0
    for row in rows_of(query):
        if row not in rows:
            rows[row] = None
            size += sum(len(cell) for cell in row if isinstance(cell, str | bytes))
            if len(rows) >= limit or size >= characters:
                break
    return [[shown(cell) for cell in row] for row in rows]


def shown(cell: Any) -> Any:
    """Convert a cell to JSON: texts are shortened and made valid Unicode, other values written as by Python."""
    if isinstance(cell, bytes):
        return repr(cell[:_LONGEST_CELL])[:_LONGEST_CELL]
    if isinstance(cell, str):
        return cell[:_LONGEST_CELL].encode(errors="surrogateescape").decode(errors="replace")
    return str(cell) if cell in (inf, -inf) else cell


def is_equal(query: Query, expected: set[Row]) -> bool:
    """Return whether the query gives exactly the expected rows, as sets; stops at the first unexpected one."""
    met: set[Row] = set()
    for row in rows_of(query):
        if row not in expected:
            return False
        met.add(row)
    return len(met) == len(expected)


def rows_of(query: Query) -> Iterator[Row]:
    """Yield the rows of a query, run on a new connection. Raises sqlite3.Error; DatabaseFault."""
    connection = connect(query)
    try:
        connection.set_authorizer(authorize)
        yield from connection.execute(query.sql)
    finally:
        connection.close()


def connect(query: Query) -> sqlite3.Connection:
    """Return a connection to the database. Raises DatabaseFault."""
    try:
        connection = sqlite3.connect(query.uri, uri=True, isolation_level=None)
        connection.text_factory = as_text
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LARGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(query.budget.spend, _OPERATIONS)
        connection.executescript(f"PRAGMA temp_store = MEMORY; PRAGMA trusted_schema = OFF; {query.script}")
        # SQLite opens a file only on the first read
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        raise DatabaseFault(str(error)) from error
    return connection


def as_text(value: bytes) -> str:
    """Decode a text of the database; bytes that are not UTF-8 stay distinct, as lone surrogates."""
    return value.decode(errors="surrogateescape")


def authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    """Authorizer of SQLite: allow only read operations.

    Table-valued functions (json_each, pragma_table_info) declare their columns by an apparent update of the schema;
    SQLite itself refuses real ones.
    """
    if action in _READING:
        allowed = True
    elif action == sqlite3.SQLITE_PRAGMA:
        allowed = (first or "").lower() in _PRAGMAS
    elif action == sqlite3.SQLITE_FUNCTION:
        allowed = (second or "").lower() not in _FUNCTIONS_REFUSED
    else:
        allowed = action == sqlite3.SQLITE_UPDATE and first == "sqlite_master"
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


if __name__ == "__main__":
    main(int(sys.argv[1]))
