"""Text-to-SQL over several turns, with the protocol of SkyRL-SQL.

    system, user   instructions, a schema, a question
    assistant      <think>Which cities are there?</think><sql>SELECT city FROM airports</sql>
    user           <observation>   0
                   Rome
                   <reminder>You have 5 turns left to complete the task.</reminder></observation>
    assistant      <think>...</think><solution>SELECT count(*) FROM airports WHERE city = 'Rome'</solution>

An attempt ends with the reply that has a solution, or with the last turn. Its reward is 1 if the solution's rows equal
the reference query's, as sets, 0 if they do not, and -1 if the replies break the format (`solution_of`).
Queries run in `sandbox.SANDBOX`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from treadle.core.errors import DataError
from treadle.core.metrics import Metric
from treadle.core.types import Message, Status, Task
from treadle.envs.base import Environment, EnvStep, Finish
from treadle.envs.sql.sandbox import SANDBOX, Cell, Database, Query, QueryError, QueryTimeout
from treadle.envs.tasks import check_positive

if find_spec("pandas") is None:  # checked early, but loaded only for the first table, because it is large
    raise ModuleNotFoundError("No module named 'pandas'", name="pandas")

LONGEST = 9000
"""Longest table shown in full, in characters."""
SHOWN = 50
"""Number of rows shown of a longer table."""
ENOUGH = LONGEST // 2 + 1
"""Number of rows that always exceeds the limit: each takes at least two characters."""

_TRUNCATED = f"Truncated to {SHOWN} lines since returned response too long: "


def render_table(rows: Sequence[tuple[Cell, ...]]) -> str:
    """Return the rows as text; only the first `SHOWN`, with a note, if that exceeds `LONGEST` characters."""
    frame = _frame(rows)
    if not _is_surely_long(rows):
        text: str = frame.to_string(index=False)
        if len(text) <= LONGEST:
            return text
    return _TRUNCATED + str(frame.head(SHOWN).to_string(index=False))


def _is_surely_long(rows: Sequence[tuple[Cell, ...]]) -> bool:
    """Return whether no table of these rows fits, to save rendering it: all cells of a column have the same width."""
    widths = (max((len(cell) for cell in column if isinstance(cell, str)), default=1) for column in zip(*rows))  # noqa: B905
    return len(rows) * sum(1 + width for width in widths) > LONGEST


def _frame(rows: Sequence[tuple[Cell, ...]]) -> Any:
    """Return a data frame. Columns with a text keep dtype object: pandas' inference depends on its version."""
    import pandas

    columns = {}
    for number, cells in enumerate(zip(*rows, strict=True)):
        has_text = any(isinstance(cell, str) for cell in cells)
        columns[number] = pandas.Series(cells, dtype=object if has_text else None)
    return pandas.DataFrame(columns)


INVALID = (
    "Your previous action is invalid. Follow the format of outputting thinking process and sql tool, and try again."
)
"""Message after a reply with neither query nor solution."""

BAD_FORMAT = -1.0

_SQL = re.compile(r"<sql>(.*?)</sql>", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_OBSERVED = re.compile(r"</observation>\s*")
_OTHER_TAG = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)


class TextToSql(Environment):
    """Plays one question about a SQLite database. Its options are a recipe's `environment_options`.

    max_turns: replies of the model; `rollout.max_steps` is at least that. query_seconds: time limit of a query.
    grading_seconds: time limit of each of the two compared queries, the solution and the reference. operations: limit
    of each query in operations of SQLite's virtual machine; with it, rewards do not depend on the speed or load of the
    machine, and the time limits only protect. Default: unlimited.

    The task's ground truth is the reference query. Its extras have `database`, the path of a SQLite file, or `script`,
    SQL to make one in memory. Only the model's own text is graded: tags in the rows of a database change nothing.
    """

    metrics = (
        Metric("queries", "trajectory", "mean", "queries", "queries that were run, the solution's not counted"),
        Metric("query_failed", "step", "mean", "share", "queries that failed or took too long"),
        Metric("no_action", "trajectory", "mean", "replies", "replies with neither query nor solution"),
        Metric("bad_format", "trajectory", "mean", "share", "attempts whose replies break the format"),
    )

    def __init__(
        self,
        max_turns: int = 6,
        query_seconds: float = 5.0,
        grading_seconds: float = 30.0,
        operations: int | None = None,
    ) -> None:
        check_positive("max_turns", max_turns, whole=True)
        check_positive("query_seconds", query_seconds)
        check_positive("grading_seconds", grading_seconds)
        if operations is not None:
            check_positive("operations", operations, whole=True)
        self._max_turns, self._query_seconds, self._grading_seconds = max_turns, query_seconds, grading_seconds
        self._operations = operations

    def reset(self, task: Task) -> Sequence[Message]:
        self._database, self._gold = database_of(task), task.ground_truth
        self._replies: list[str] = []
        SANDBOX.start_spare()
        return task.prompt

    def step(self, text: str) -> EnvStep:
        self._replies.append(text)
        turns_left = self._max_turns - len(self._replies)
        if turns_left <= 0 or ("<solution>" in text and "</solution>" in text):
            reward, info = self._grade()
            return EnvStep(reward=reward, done=True, info=info)
        query = _SQL.search(text)
        if query is None:
            return EnvStep([observation(INVALID, turns_left)], info={"no_action": 1})
        shown, failed = run_query(Query(self._database, query[1], self._query_seconds, self._operations))
        return EnvStep([observation(shown, turns_left)], info={"queries": 1, "query_failed": failed})

    def finish(self, ended: Status) -> Finish | None:
        """Grade an attempt that made fewer calls than its turns (`rollout.max_steps`); without a solution, -1."""
        return Finish(*self._grade()) if ended is Status.MAX_STEPS else None

    def _grade(self) -> tuple[float, Mapping[str, Any]]:
        sql = solution_of(self._replies)
        info = {"queries": 0, "no_action": 0, "bad_format": sql is None}
        if sql is None:
            return BAD_FORMAT, info
        return grade(Query(self._database, sql, self._grading_seconds, self._operations), self._gold), info


def run_query(query: Query) -> tuple[str, bool]:
    """Return the agent's view of a query's result, and whether the query failed or timed out."""
    try:
        rows = SANDBOX.select(query, ENOUGH)
    except QueryTimeout:
        return f"SQL Timeout:\n{query.sql}", True
    except QueryError as error:
        place = ":memory:" if query.database.file is None else query.database.file.name
        return f"Error executing SQL: {error}, db file: {place}", True
    return render_table(rows), False


def grade(query: Query, gold: str) -> float:
    """Return the reward of a solution: 1 if its rows equal `gold`'s, 0 if not, or if it fails or times out."""
    try:
        return float(SANDBOX.has_same_rows(query, gold))
    except QueryError:
        return 0.0


def observation(shown: str, turns_left: int) -> Message:
    """Return the message with an observation for the agent."""
    reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
    return Message(role="user", content=f"\n\n<observation>{shown}\n{reminder}</observation>\n\n")


def solution_of(replies: Sequence[str]) -> str | None:
    """Return the query of the only solution; None if the replies break the format.

    The format requires exactly one `<solution>`, followed by one `</solution>` with no other tag between, at least one
    thought, and `<think>` after each observation before the solution. An observation separates any two replies; its
    contents do not matter.
    """
    text = "<observation></observation>".join(replies)
    before, _, after = text.partition("<solution>")
    solution, closed, rest = after.partition("</solution>")
    one = closed and "<solution>" not in after and "</solution>" not in rest
    if not one or _OTHER_TAG.search(solution) or not _THOUGHT.search(text):
        return None
    before = before.lower()
    if any(not before.startswith("<think>", observed.end()) for observed in _OBSERVED.finditer(before)):
        return None
    return solution.strip()


def database_of(task: Task) -> Database:
    """Return the database of a task. Raises DataError, naming the task and its missing data."""
    where = f"task {task.task_id} of environment text_to_sql"
    extras = task.extras
    file, script = extras.get("database"), extras.get("script")
    if not (isinstance(file, str) ^ isinstance(script, str)):
        raise DataError(f"{where} needs one of `database`, a path, and `script`, SQL, in extras; it has {list(extras)}")
    if isinstance(file, str) and not Path(file).is_file():
        raise DataError(f"{where}: no file {file!r}; correct `database` in its extras, or fetch the database")
    if not isinstance(task.ground_truth, str):
        raise DataError(f"{where} needs its reference query, a string, in ground_truth, got {task.ground_truth!r:.100}")
    return Database(script=script) if isinstance(script, str) else Database(Path(str(file)))
