"""Tasks of `text_to_sql` from the published data sets: SkyRL-SQL, Spider and BIRD.

    skyrl_sql       SkyRL-SQL-653: rows with a prompt, `db_id`, `data` and `reward_spec.ground_truth`
                      DATABASES/SynSQL-2.5M/databases/ID/ID.sqlite, .../spider/database/..., .../bird/train/...
    sql_questions   Spider's and BIRD's JSON: `db_id`, `question`, `query` or `SQL`, and BIRD's `evidence`
                      DATABASES/ID/ID.sqlite

A missing database is an error before anything is played.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from treadle.core.errors import ConfigError, DataError, TrajectoryFailure
from treadle.core.types import Message, Task
from treadle.data.config import Columns, SourceConfig
from treadle.data.load import LoadContext, open_rows
from treadle.data.rows import make_task
from treadle.envs.sql.sandbox import SANDBOX, Database, Query

LAYOUTS: Mapping[str, str] = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}
"""SkyRL-SQL's `data` -> where its databases lie."""

INSTRUCTIONS = """\
You answer questions about a SQLite database. You may look at it with queries before you give the query that answers.

- Begin every turn with your thoughts, in <think>...</think>.
- To look at the database, write one query in <sql>...</sql>. You then read its rows in <observation>...</observation>.
- When you know the answer, write the query that gives exactly what is asked, in <solution>...</solution>, once.
- Your turns are limited; every observation says how many are left."""

_COLUMNS: Columns = {
    "prompt": "prompt",
    "ground_truth": "reward_spec.ground_truth",
    "extras": {"db_id": "db_id", "data": "data"},
}
_SCHEMA = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
_MOST_STATEMENTS = 10_000
_PATIENCE = 30.0  # seconds to read a schema


def skyrl_sql(split: str, file: str, databases: str, file_split: str = "") -> Iterator[Task]:
    """Yield the tasks of SkyRL-SQL's rows.

    file: Parquet or JSON lines, or whatever else `data.train.source` takes; file_split: which split of it. databases:
    the directory with `SynSQL-2.5M`, `spider` and `bird`. Raises ConfigError; DataError for a row, naming it.
    """
    for row in open_rows(SourceConfig(source=file, split=file_split), split, f"data.{split}", LoadContext()):
        task = make_task(row, _COLUMNS)
        db_id, data = (task.extras[key] for key in ("db_id", "data"))
        if data not in LAYOUTS:
            raise DataError(f"{row.where}: data is {data!r}; it must be one of {', '.join(LAYOUTS)}")
        database = _database(Path(databases, LAYOUTS[data]), db_id, row.where)
        extras = {**task.extras, "database": str(database)}
        yield Task(task.task_id, task.prompt, "text_to_sql", task.ground_truth, extras)


def sql_questions(split: str, file: str, databases: str) -> Iterator[Task]:
    """Yield the tasks of a file of Spider or BIRD: a JSON array of questions.

    file: such as `spider/train_spider.json` or `bird/train/train.json`. databases: the directory with a directory for
    each database: `spider/database`, `bird/train/train_databases`. The prompt has the database's schema as its CREATE
    statements, and BIRD's evidence. Extras keep `db_id`, and `difficulty` where there is one. Raises ConfigError;
    DataError for a row, naming it.
    """
    for number, row in enumerate(_read_array(Path(file))):
        where = f"{file}: question {number} (counted from 0)"
        db_id, question, gold = (
            _text(row, where, "db_id"),
            _text(row, where, "question"),
            _text(row, where, "query", "SQL"),
        )
        database = _database(Path(databases), db_id, where)
        extras = {"db_id": db_id, "database": str(database)}
        if "difficulty" in row:
            extras["difficulty"] = row["difficulty"]
        prompt = _prompt(_schema(database), question, row.get("evidence") or "")
        yield Task(f"{Path(file).stem}-{number:06d}", prompt, "text_to_sql", gold, extras)


def _database(folder: Path, db_id: Any, where: str) -> Path:
    file = folder / str(db_id) / f"{db_id}.sqlite"
    if not file.is_file():
        raise DataError(f"{where}: no database {str(file)!r}; correct the option databases, or fetch it")
    return file


def _read_array(file: Path) -> list[Any]:
    try:
        rows = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"the option file: cannot read {str(file)!r}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{file}: not JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: it must be a JSON array of questions, as Spider and BIRD have it")
    return rows


def _text(row: Any, where: str, *keys: str) -> str:
    """Return the first of these keys that the row has, a text."""
    for key in keys:
        if isinstance(row, Mapping) and isinstance(row.get(key), str):
            return str(row[key])
    raise DataError(f"{where}: needs {' or '.join(keys)}, a text; it is {row!r:.200}")


@cache
def _schema(database: Path) -> str:
    """Return the statements that made a database's tables, indices and views."""
    try:
        rows = SANDBOX.select(Query(Database(database), _SCHEMA, _PATIENCE), _MOST_STATEMENTS)
    except TrajectoryFailure as error:
        raise DataError(f"{error.message}; fetch it again") from error
    return "\n".join(f"{statement};" for (statement,) in rows)


def _prompt(schema: str, question: str, evidence: str) -> tuple[Message, ...]:
    parts = {"Schema": schema, "Known": evidence, "Question": question}
    content = "\n\n".join(f"{name}:\n{text}" for name, text in parts.items() if text)
    return (Message(role="system", content=INSTRUCTIONS), Message(role="user", content=content))
