"""The model's SQL in its confined child: what is refused, what is stopped, and that others do not notice."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.until import CEILING, alive, wait_until
from treadle.core.errors import Cause, TrajectoryFailure
from treadle.envs.sql.sandbox import ADDRESS_SPACE, Database, Query, QueryError, QueryTimeout, Sandbox

pytestmark = pytest.mark.xdist_group("envs_sql_sandbox")  # what its tests share is made once

LIMIT, ROWS = 0.2, 4501
TWO = Database(script="CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (1, 'x')")

NUMBERS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) "
DOUBLED = "WITH RECURSIVE c(s, n) AS (SELECT 'a', 1 UNION ALL SELECT s || s, n + 1 FROM c WHERE n < 21) "

REFUSED = {
    "attach a file": "ATTACH DATABASE '{folder}/new.db' AS x",
    "attach memory": "ATTACH ':memory:' AS x",
    "attach by URI": "ATTACH 'file:{folder}/new.db?mode=rwc' AS x",
    "detach": "DETACH main",
    "writing pragma": "PRAGMA writable_schema = 1",
    "journal pragma": "PRAGMA journal_mode = WAL",
    "user version": "PRAGMA user_version = 7",
    "pragma of the limits": "PRAGMA hard_heap_limit = 1",
    "pragma that reads paths": "PRAGMA database_list",
    "pragma function": "SELECT * FROM pragma_database_list()",
    "temp directory": "PRAGMA temp_store_directory = '{folder}'",
    "insert": "INSERT INTO t VALUES (9, 'z')",
    "insert that returns": "INSERT INTO t VALUES (9, 'z') RETURNING a",
    "update": "UPDATE t SET b = 'z'",
    "update of the schema": "UPDATE sqlite_master SET sql = 'CREATE TABLE u (a)'",
    "delete": "DELETE FROM t",
    "drop": "DROP TABLE t",
    "create": "CREATE TABLE u (a)",
    "temporary table": "CREATE TEMP TABLE u AS SELECT 1",
    "temporary view": "CREATE TEMP VIEW v AS SELECT 1",
    "virtual table": "CREATE VIRTUAL TABLE v USING fts5(a)",
    "trigger": "CREATE TRIGGER r AFTER INSERT ON t BEGIN DELETE FROM t; END",
    "vacuum": "VACUUM",
    "vacuum into": "VACUUM INTO '{folder}/new.db'",
    "reindex": "REINDEX",
    "analyze": "ANALYZE",
    "begin": "BEGIN IMMEDIATE",
    "savepoint": "SAVEPOINT s",
    "load_extension": "SELECT load_extension('{folder}/x.so')",
    "readfile": "SELECT readfile('/etc/passwd')",
    "writefile": "SELECT writefile('{folder}/new', 'x')",
    "fts3_tokenizer": "SELECT fts3_tokenizer('simple')",
    "second statement": "SELECT 1; DROP TABLE t",
    "huge blob": "SELECT zeroblob(1000000000)",
    "huge random blob": "SELECT hex(randomblob(1000000000))",
    "NUL": "SELECT 1\0",
    "deep nesting": "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "long LIKE pattern": f"SELECT 'a' LIKE '{'%a' * 40_000}'",
}
STOPPED = {
    "endless recursion": NUMBERS + "SELECT count(*) FROM c",
    "endless recursion, no row": NUMBERS + "SELECT n FROM c WHERE n < 0",
    "endless equal rows": NUMBERS + "SELECT 1 FROM c",
    "cartesian product": "SELECT count(*) FROM big x, big y, big z",
    "sorted product": "SELECT x.b FROM big x, big y ORDER BY x.b || y.b",
    "long printf": "SELECT printf('%.*c', 1000000000, 'x')",
    "quadratic instr": DOUBLED + "SELECT instr(max(s), substr(max(s), 1, 400000) || 'b') FROM c",
    "deep LIKE": DOUBLED + "SELECT max(s) LIKE '%' || substr(max(s), 1, 40000) || 'b' FROM c",
    "deep GLOB": DOUBLED + "SELECT max(s) GLOB '*' || substr(max(s), 1, 40000) || 'b' FROM c",
    "growing text": "SELECT group_concat(x.b) FROM big x, big y",
    "growing replacement": "SELECT replace(hex(zeroblob(4000000)), '0', 'aaaaaaaaaaaaaaaa')",
    "product of JSON": DOUBLED
    + "SELECT count(*) FROM big, json_each('[' || substr(replace((SELECT max(s) FROM c), 'a', "
    "'1,'), 1, 100001) || ']') x, json_each('[1,2,3]') y",
}
"""Attacks that run into a limit of time, length or memory."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with closing(Sandbox(children=3)) as made:
        yield made


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a small table and a larger one, alone in its directory."""
    path = tmp_path_factory.mktemp("databases") / "a b%?.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = WAL")  # of which SQLite likes to make files
        database.executescript("CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y')")
        database.execute("CREATE TABLE big (a INTEGER, b TEXT UNIQUE)")
        database.executemany("INSERT INTO big VALUES (?, ?)", [(n, f"{n:050}") for n in range(5000)])
        database.commit()
    return path


def select(sandbox: Sandbox, database: Database, sql: str, seconds: float = CEILING) -> list[tuple[Any, ...]]:
    return sandbox.select(Query(database, sql, seconds), ROWS)


def state(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("attack", REFUSED)
def test_refused(sandbox: Sandbox, file: Path, attack: str) -> None:
    before = state(file.parent)
    with pytest.raises(QueryError) as caught:
        select(sandbox, Database(file), REFUSED[attack].format(folder=file.parent))
    assert not isinstance(caught.value, QueryTimeout)
    assert state(file.parent) == before
    assert select(sandbox, Database(file), "SELECT * FROM t") == [(1, "x"), (2, "y")]


@pytest.mark.parametrize("attack", STOPPED)
def test_stopped_and_the_next_query_is_answered(sandbox: Sandbox, file: Path, attack: str) -> None:
    before = state(file.parent)
    with pytest.raises(QueryError if attack.startswith("growing") else QueryTimeout):
        select(sandbox, Database(file), STOPPED[attack], LIMIT)
    assert select(sandbox, TWO, "SELECT b FROM t WHERE a = 2") == [("y",)]
    assert state(file.parent) == before


@pytest.mark.parametrize("attack", ["endless recursion", "long printf"])
def test_in_grading_too(sandbox: Sandbox, attack: str) -> None:
    with pytest.raises(QueryTimeout):
        sandbox.has_same_rows(Query(TWO, STOPPED[attack], LIMIT), "SELECT b FROM t")
    assert sandbox.has_same_rows(Query(TWO, "SELECT 'y' UNION SELECT 'x'", CEILING), "SELECT b FROM t")


def test_a_query_does_not_wait_for_one_that_hangs(sandbox: Sandbox) -> None:
    ended: list[QueryError] = []

    def attack() -> None:
        with pytest.raises(QueryError) as caught:
            select(sandbox, TWO, STOPPED["endless recursion"])
        ended.append(caught.value)

    thread = threading.Thread(target=attack)
    thread.start()
    wait_until(lambda: sandbox._running)
    [child] = sandbox._running
    assert select(sandbox, TWO, "SELECT 1") == [(1,)]
    assert not ended
    os.kill(child.pid, signal.SIGKILL)
    thread.join()
    assert not isinstance(ended[0], QueryTimeout)


def test_a_billion_rows_end_with_those_that_can_be_shown(sandbox: Sandbox, file: Path) -> None:
    sql = "SELECT x.a, y.a, z.a FROM big x, big y, big z"
    rows = select(sandbox, Database(file), sql)
    assert len(rows) == ROWS and rows[:2] == [(0, 0, 0), (0, 0, 1)]
    assert not sandbox.has_same_rows(Query(Database(file), sql, CEILING), "SELECT a, a, a FROM big")
    with pytest.raises(TrajectoryFailure):
        sandbox.has_same_rows(Query(Database(file), "SELECT 1", LIMIT), sql)


def test_memory_is_bounded(sandbox: Sandbox, file: Path) -> None:
    """By the kernel: a child that has to keep 5 GB of rows for comparison ends, and is replaced."""
    select(sandbox, TWO, "SELECT 1")
    for child in sandbox._idle:
        child.wait_until_ready(CEILING)
        limits = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
        values = {line[:26].strip(): line[26:].split()[0] for line in limits}
        assert values["Max address space"] == str(ADDRESS_SPACE)
        assert values["Max file size"] == values["Max core file size"] == "0"
    with pytest.raises(TrajectoryFailure, match="the reference query failed") as caught:
        sandbox.has_same_rows(Query(Database(file), "SELECT 1", CEILING), "SELECT zeroblob(1000000), a FROM big")
    assert caught.value.cause is Cause.VERIFIER and "out of memory" in caught.value.message
    assert select(sandbox, TWO, "SELECT 1") == [(1,)]


def test_a_child_that_dies_fails_its_query_only() -> None:
    with closing(Sandbox(children=2)) as sandbox:
        select(sandbox, TWO, "SELECT 1")
        for child in sandbox._idle:
            child.wait_until_ready(CEILING)
            os.kill(child.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(QueryError, match="its process ended"):
                select(sandbox, TWO, "SELECT 1")
        assert select(sandbox, TWO, "SELECT 1") == [(1,)]


def test_more_queries_than_children_take_turns() -> None:
    results: list[list[tuple[Any, ...]]] = []
    with closing(Sandbox(children=2)) as sandbox:

        def play() -> None:
            results.append(select(sandbox, TWO, "SELECT count(*) FROM t"))
            assert len(sandbox._running) <= 2

        threads = [threading.Thread(target=play) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [[(3,)]] * 12


PARENT = """
import sys
from treadle.envs.sql.sandbox import Database, Query, SANDBOX
SANDBOX.select(Query(Database(), "SELECT 1", 9), 1)
print(*(child.pid for child in SANDBOX._idle), flush=True)
{then}
"""


def children_of(then: str) -> tuple["subprocess.Popen[str]", list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("then", ["", "input()"])
def test_children_end_with_their_parent(then: str) -> None:
    process, pids = children_of(then)
    assert len(pids) == 2
    with process:
        if then:
            process.kill()
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.slow
def test_a_child_that_is_busy_ends_after_its_parent_was_killed() -> None:
    sql = STOPPED["long printf"].replace("1000000000", "2147483647")
    process, pids = children_of(
        f"SANDBOX.select(Query(Database(), {f'SELECT count(*) FROM ({sql}), ({sql})'!r}, 1), 1)"
    )
    with process:
        time.sleep(0.5)
        process.kill()
    wait_until(lambda: not any(map(alive, pids)))


def test_what_reads_is_allowed(sandbox: Sandbox, file: Path) -> None:
    database = Database(file)
    assert select(sandbox, database, "PRAGMA table_info(t)")[0] == (0, "a", "INTEGER", 0, None, 0)
    assert select(sandbox, database, "PRAGMA foreign_key_list(t)") == []
    assert select(sandbox, database, "pragma INDEX_LIST(big)") == [(0, "sqlite_autoindex_big_1", 1, "u", 0)]
    assert select(sandbox, database, "SELECT name FROM pragma_table_info('t')") == [("a",), ("b",)]
    assert select(sandbox, database, "SELECT value FROM json_each('[4, 5]')") == [(4,), (5,)]
    names = select(sandbox, database, "SELECT name FROM sqlite_master")
    assert names == [("t",), ("big",), ("sqlite_autoindex_big_1",)]
    assert select(sandbox, database, "EXPLAIN QUERY PLAN SELECT * FROM t")
    assert select(sandbox, database, "") == select(sandbox, database, "SELECT 1 WHERE 0") == []
    numbered = "SELECT printf('%.2f', 1.239), row_number() OVER (ORDER BY a) FROM t"
    assert select(sandbox, database, numbered) == [("1.24", 1), ("1.24", 2)]


def test_cells_and_distinct_rows_in_the_order_of_the_query(sandbox: Sandbox) -> None:
    assert select(sandbox, TWO, "SELECT b, a FROM t ORDER BY a DESC") == [("y", 2), ("x", 1)]
    sql = "SELECT 1, 2.5, NULL, 'é', x'00ff', CAST(x'41ff' AS TEXT), 9e999, -9e999"
    assert select(sandbox, TWO, sql) == [(1, 2.5, None, "é", "b'\\x00\\xff'", "A�", "inf", "-inf")]
    [[text]] = select(sandbox, TWO, "SELECT printf('%.*c', 20000, 'x')")
    assert text == "x" * 9000


def test_a_file_that_is_no_database_is_the_environments_fault(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("no database " * 100)
    for path in (tmp_path / "none.sqlite", tmp_path / "text.sqlite"):
        with pytest.raises(TrajectoryFailure, match=f"{path.name} is not a database") as caught:
            select(sandbox, Database(path), "SELECT 1")
        assert caught.value.cause is Cause.ENVIRONMENT
    with pytest.raises(TrajectoryFailure, match="a task's script is not a database: near"):
        select(sandbox, Database(script="CREATE TABBLE t"), "SELECT 1")
    assert [path.name for path in tmp_path.iterdir()] == ["text.sqlite"]


CELLS = st.one_of(
    st.none(), st.integers(-2, 2), st.sampled_from([0.5, 1.0, -2.0]), st.sampled_from(["", "1", "a", "A", "é"])
)
TABLES = st.integers(1, 2).flatmap(lambda width: st.lists(st.tuples(*[CELLS] * width), max_size=5))


def values(rows: Sequence[tuple[Any, ...]]) -> str:
    if not rows:
        return "SELECT 1 WHERE 0"
    literals = ({None: "NULL"}.get(cell, repr(cell)) for row in rows for cell in row)
    width = len(rows[0])
    cells = list(literals)
    return "VALUES " + ", ".join(f"({', '.join(cells[at : at + width])})" for at in range(0, len(cells), width))


@given(TABLES, TABLES, st.booleans(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_rows_are_equal_as_sets(
    sandbox: Sandbox, gold: list[tuple[Any, ...]], other: list[tuple[Any, ...]], same: bool, draws: Any
) -> None:
    rows = [*gold, *gold[:1]] if same else other
    draws.shuffle(rows)
    assert sandbox.has_same_rows(Query(TWO, values(rows), CEILING), values(gold)) == (set(rows) == set(gold))


def test_texts_that_are_no_utf_8_are_compared_byte_by_byte(sandbox: Sandbox) -> None:
    query = Query(TWO, "SELECT CAST(x'41ff' AS TEXT)", CEILING)
    assert sandbox.has_same_rows(query, "SELECT CAST(x'41ff' AS TEXT)")
    assert not sandbox.has_same_rows(query, "SELECT CAST(x'41fe' AS TEXT)")
    assert not sandbox.has_same_rows(query, "SELECT x'41ff'")


def test_a_reference_that_fails_is_the_verifiers_fault(sandbox: Sandbox) -> None:
    with pytest.raises(TrajectoryFailure, match=r"no such table: missing.*correct or remove the task") as caught:
        sandbox.has_same_rows(Query(TWO, "SELECT 1", 20), "SELECT * FROM missing")
    assert caught.value.cause is Cause.VERIFIER
