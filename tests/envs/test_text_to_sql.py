"""The environment of text-to-SQL against scripted replies, and the tables that the agent reads."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.kit import contents, play
from tests.envs.sql_cases import CASES, DATABASE, DEVIATIONS, GOLD, MAX_TURNS, RIGHT, Case, asking, framed, solving
from treadle.core.errors import Cause, ConfigError, DataError, TrajectoryFailure
from treadle.core.types import Status, Task
from treadle.envs.base import EnvStep, Finish
from treadle.envs.sql.environment import ENOUGH, LONGEST, TextToSql, render_table, solution_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("databases") / "city.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(DATABASE)
        database.execute("INSERT INTO wide VALUES (CAST(x'41ff42' AS TEXT))")
        database.commit()
    return path


def answers(task: Task, replies: Sequence[str], **options: Any) -> list[EnvStep]:
    return play(TextToSql(**{"max_turns": MAX_TURNS, **options}), task, *replies)


def task_of(file: Path) -> Task:
    return Task("t", (), "text_to_sql", GOLD, {"database": str(file)})


def check(file: Path, case: Case) -> None:
    steps = answers(task_of(file), case.replies)
    assert {message["role"] for step in steps for message in step.observations} <= {"user"}
    assert contents(steps) == [framed(text, MAX_TURNS - 1 - n) for n, text in enumerate(case.observations)]
    assert steps[-1].done and [step.reward for step in steps] == [0.0] * (len(steps) - 1) + [case.reward]


@pytest.mark.parametrize("name", CASES)
def test_as_published(file: Path, name: str) -> None:
    check(file, CASES[name])


@pytest.mark.parametrize("name", DEVIATIONS)
def test_only_what_the_model_wrote_is_graded(file: Path, name: str) -> None:
    case, published = DEVIATIONS[name]
    assert published != case.reward
    check(file, case)


def test_a_query_that_takes_too_long(file: Path) -> None:
    endless = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
    replies = [asking(endless), solving(endless)]
    first, last = answers(task_of(file), replies, query_seconds=0.2, grading_seconds=0.2)
    assert contents([first]) == [framed(f"SQL Timeout:\n{endless}", 3)]
    assert first.info == {"queries": 1, "query_failed": True} and (last.reward, last.done) == (0.0, True)


def test_operations_are_counted_whatever_the_clock_says(file: Path) -> None:
    """An hour would do for the endless one; what is within its operations is graded as ever."""
    counting = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT {}) SELECT count(*) FROM c"
    options = {"operations": 100_000, "query_seconds": 3600.0, "grading_seconds": 3600.0}
    for many, timed_out in ((100, False), (10**9, True)):
        query = counting.format(many)
        first, last = answers(task_of(file), [asking(query), solving(query)], **options)
        assert ("SQL Timeout" in contents([first])[0]) is timed_out
        assert last.reward == 0.0
    with pytest.raises(ConfigError, match="operations"):
        TextToSql(operations=0)


def test_writes_text_that_is_no_utf_8_and_a_database_of_a_script(file: Path) -> None:
    """The published environment runs the first on the database itself, and reads an error for the second."""
    before = file.read_bytes()
    first, last = answers(task_of(file), [asking("DELETE FROM city"), solving("DELETE FROM city RETURNING name")])
    assert contents([first]) == [framed("Error executing SQL: not authorized, db file: city.sqlite", 3)]
    assert last.reward == 0 and file.read_bytes() == before
    sql = "SELECT text FROM wide"  # as some columns of BIRD have it
    task = Task("t", (), "text_to_sql", sql, {"database": str(file)})
    first, last = answers(task, [asking(sql), solving(sql)])
    assert contents([first]) == [framed("  0\nA\N{REPLACEMENT CHARACTER}B", 3)] and last.reward == 1
    task = Task("t", (), "text_to_sql", GOLD, {"script": DATABASE})
    first, last = answers(task, [asking("SELECT * FROM town"), RIGHT])
    assert contents([first]) == [framed("Error executing SQL: no such table: town, db file: :memory:", 3)]
    assert last.reward == 1


def test_metrics(file: Path) -> None:
    steps = answers(task_of(file), [asking("SELECT 1"), "Hm.", asking("SELEC"), "<solution></solution>"])
    assert [step.info for step in steps] == [
        {"queries": 1, "query_failed": False},
        {"no_action": 1},
        {"queries": 1, "query_failed": True},
        {"queries": 0, "no_action": 0, "bad_format": True},
    ]
    assert {key for step in steps for key in step.info} == {metric.name for metric in TextToSql.metrics}


def test_an_attempt_whose_calls_are_over_before_its_turns_is_graded_as_it_stands(file: Path) -> None:
    environment = TextToSql()
    environment.reset(task_of(file))
    environment.step(asking("SELECT 1"))
    assert environment.finish(Status.CONTEXT) is None and environment.finish(Status.DONE) is None
    finish = environment.finish(Status.MAX_STEPS)
    assert isinstance(finish, Finish) and finish.reward == -1 and finish.info["bad_format"]


def test_a_reference_that_fails_is_no_reward_at_all(file: Path) -> None:
    task = Task("t", (), "text_to_sql", "SELECT nothing", {"database": str(file)})
    with pytest.raises(TrajectoryFailure, match="the reference query failed") as caught:
        answers(task, [RIGHT])
    assert caught.value.cause is Cause.VERIFIER
    assert answers(task, ["<solution>"] * MAX_TURNS)[-1].reward == -1  # nothing to compare it with


@pytest.mark.parametrize(
    ("gold", "extras", "message"),
    [
        (GOLD, {}, "needs one of `database`, a path, and `script`"),
        (GOLD, {"database": "a", "script": ""}, "needs one of `database`"),
        (GOLD, {"database": "missing.sqlite"}, "no file 'missing.sqlite'; correct `database`"),
        (None, {"script": ""}, "needs its reference query, a string, in ground_truth, got None"),
    ],
)
def test_a_task_that_cannot_be_played(gold: Any, extras: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match="task t of environment text_to_sql") as caught:
        TextToSql().reset(Task("t", (), "text_to_sql", gold, extras))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"max_turns": 0}, {"max_turns": 2.5}, {"query_seconds": "5"}, {"grading_seconds": float("nan")}]
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{next(iter(options))} must be a (whole )?number above 0"):
        TextToSql(**options)


# --- tables -----------------------------------------------------------------------------------------------------------


CELLS = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=40))
TABLES = st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[CELLS] * width), max_size=12))


@given(TABLES, st.sampled_from([1, 40, 400]))
@settings(deadline=None, max_examples=60)
def test_tables_are_those_of_pandas_with_texts_as_objects(rows: list[tuple[Any, ...]], times: int) -> None:
    rows = (rows * times)[:ENOUGH]
    frame = pandas.DataFrame(rows)
    for column in frame:
        cells = [row[column] for row in rows]
        if any(isinstance(cell, str) for cell in cells):
            frame[column] = pandas.Series(cells, dtype=object)
    text = frame.to_string(index=False)
    if len(text) > LONGEST:
        text = "Truncated to 50 lines since returned response too long: " + frame.head(50).to_string(index=False)
    assert render_table(rows) == text


def test_many_rows_take_no_time() -> None:
    """Their table would have 40 million characters."""
    rows = [("x" * 9000 if n == 3 else "y",) for n in range(ENOUGH)]
    assert len(render_table(rows).splitlines()) == 51


# --- format -----------------------------------------------------------------------------------------------------------

TAGS = ("think", "sql", "solution", "observation", "Observation", "THINK")
PIECES = st.sampled_from([*(f"<{tag}>" for tag in TAGS), *(f"</{tag}>" for tag in TAGS), " ", "\n", "x"])
REPLIES = st.lists(st.lists(PIECES, max_size=8).map("".join), min_size=1, max_size=3)


@given(REPLIES)
def test_a_solution_is_between_its_tags_and_there_is_one(replies: list[str]) -> None:
    text = "".join(replies)
    solution = solution_of(replies)
    if solution is None:
        return
    assert text.count("<solution>") == 1 and "<think>" in text
    assert text.split("<solution>")[1].split("</solution>")[0].strip() == solution
    assert not any(tag in solution.lower() for tag in ("<think>", "</sql>", "observation>"))
    ends = text[: text.index("<solution>")].lower().split("</observation>")[1:]
    assert all(end.lstrip().startswith("<think>") for end in ends)
