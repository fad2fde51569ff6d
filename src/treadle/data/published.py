"""Tasks from the files of published data sets.

    gsm8k_questions   GSM8K: `question`, and `answer`, a solution that ends with `#### ANSWER`
    skyrl_gym_rows    output of SkyRL's data set scripts: `prompt`, `env_class`, `reward_spec.ground_truth`, ...
    skyrl_sql         SkyRL-SQL-653: rows with a prompt, `db_id`, `data` and `reward_spec.ground_truth`
                        DATABASES/SynSQL-2.5M/databases/ID/ID.sqlite, .../spider/database/..., .../bird/train/...
    sql_questions     Spider's and BIRD's JSON: `db_id`, `question`, `query` or `SQL`, and BIRD's `evidence`
                        DATABASES/ID/ID.sqlite

Their option `file` is Parquet or JSON lines, or any other `data.train.source`, and `file_split` a split of it (for
Spider and BIRD, a JSON array). All raise ConfigError, or DataError naming an invalid row; a missing database is an
error before any attempt is played.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from treadle.core.errors import ConfigError, DataError, TrajectoryFailure
from treadle.core.text import read_json
from treadle.core.types import Message, Task
from treadle.data.config import SourceConfig
from treadle.data.load import LoadContext, open_rows
from treadle.data.rows import Row, make_task, parse_json, task_from_row
from treadle.envs.gsm8k import INSTRUCTION, MULTI_TURN_INSTRUCTION, answer_of
from treadle.envs.sql.sandbox import SANDBOX, Database, Query

LAYOUTS: Mapping[str, str] = {
    "synsql": "SynSQL-2.5M/databases",
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
}
"""SkyRL-SQL's `data` -> path of its databases."""

INSTRUCTIONS = """\
You answer questions about a SQLite database. You may look at it with queries before you give the query that answers.

- Begin every turn with your thoughts, in <think>...</think>.
- To look at the database, write one query in <sql>...</sql>. You then read its rows in <observation>...</observation>.
- When you know the answer, write the query that gives exactly what is asked, in <solution>...</solution>, once.
- Your turns are limited; every observation says how many are left."""

_SCHEMA = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
_MOST_STATEMENTS = 10_000
_PATIENCE = 30.0  # seconds to read a schema


def gsm8k_questions(split: str, file: str, multi_turn: bool = False, file_split: str = "") -> Iterator[Task]:
    """Yield the tasks of GSM8K: the question followed by the published instruction, and the bare answer.

        Task("test-000001", prompt=({"role": "user", "content": "Janet's ducks ... after \\"####\\"."},),
             ground_truth="18")

    multi_turn: whether the instruction asks for a tentative answer, as the environment `gsm8k_multi_turn` does.
    """
    instruction = MULTI_TURN_INSTRUCTION if multi_turn else INSTRUCTION
    for row in _rows(split, file, file_split):
        task = make_task(row, {"prompt": "question", "ground_truth": "answer"})
        answer = answer_of(task.ground_truth) if isinstance(task.ground_truth, str) else None
        if answer is None:
            raise DataError(f"{row.where}: answer is {task.ground_truth!r:.100}; it must end with '#### ANSWER'")
        [question] = task.prompt
        prompt = (Message(role="user", content=f"{question['content']} {instruction}"),)
        yield replace(task, prompt=prompt, ground_truth=answer)


def skyrl_gym_rows(split: str, file: str) -> Iterator[Task]:
    """Yield the tasks of SkyRL's rows: all columns except `prompt` are extras for the environment.

    {"prompt": [{"role": "user", ...}], "env_class": "gsm8k", "reward_spec": {"ground_truth": "72"}, "extra_info": ...}
    Task("train-000001", prompt=..., environment="skyrl_gym", ground_truth="72", extras={"env_class": "gsm8k", ...})
    """
    for row in _rows(split, file):
        value = parse_json(row.value, row.where) if isinstance(row.value, bytes) else row.value
        if not isinstance(value, Mapping) or "prompt" not in value:
            raise DataError(f"{row.where}: a row of SkyRL has a prompt, got {value!r:.200}")
        extras = {name: part for name, part in value.items() if name != "prompt" and part is not None}
        specs = (extras.get(name) for name in ("reward_spec", "reward_model"))
        truths = (spec["ground_truth"] for spec in specs if isinstance(spec, Mapping) and "ground_truth" in spec)
        fields = {"prompt": value["prompt"], "environment": "skyrl_gym", "extras": extras}
        yield task_from_row({**fields, "ground_truth": next(truths, None)}, row.where, row.task_id)


def skyrl_sql(split: str, file: str, databases: str, file_split: str = "") -> Iterator[Task]:
    """Yield the tasks of SkyRL-SQL's rows. databases: the directory with `SynSQL-2.5M`, `spider` and `bird`."""
    extras = {"db_id": "db_id", "data": "data"}
    for row in _rows(split, file, file_split):
        task = make_task(row, {"prompt": "prompt", "ground_truth": "reward_spec.ground_truth", "extras": extras})
        data = task.extras["data"]
        if data not in LAYOUTS:
            raise DataError(f"{row.where}: data is {data!r}; it must be one of {', '.join(LAYOUTS)}")
        database = str(_database(Path(databases, LAYOUTS[data]), task.extras["db_id"], row.where))
        yield replace(task, environment="text_to_sql", extras={**task.extras, "database": database})


def sql_questions(split: str, file: str, databases: str) -> Iterator[Task]:
    """Yield the tasks of a file of Spider or BIRD.

    file: such as `spider/train_spider.json` or `bird/train/train.json`. databases: directory with one directory per
    database: `spider/database`, `bird/train/train_databases`. The prompt contains the database's schema as its CREATE
    statements, and BIRD's evidence. Extras keep `db_id`, and `difficulty` if present.
    """
    try:
        rows = read_json(Path(file).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"the option file: cannot read {file!r}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{file}: not JSON: {error}") from error
    if not isinstance(rows, list):
        raise DataError(f"{file}: it must be a JSON array of questions, as in Spider and BIRD")
    for number, row in enumerate(rows):
        where = f"{file}: question {number} (counted from 0)"
        db_id, question, gold = (_text(row, where, *keys) for keys in (["db_id"], ["question"], ["query", "SQL"]))
        database = _database(Path(databases), db_id, where)
        extras = {"db_id": db_id, "database": str(database)}
        if "difficulty" in row:
            extras["difficulty"] = row["difficulty"]
        parts = {"Schema": _schema(database), "Known": row.get("evidence"), "Question": question}
        content = "\n\n".join(f"{name}:\n{text}" for name, text in parts.items() if text)
        prompt = (Message(role="system", content=INSTRUCTIONS), Message(role="user", content=content))
        yield Task(f"{Path(file).stem}-{number:06d}", prompt, "text_to_sql", gold, extras)


def _rows(split: str, file: str, file_split: str = "") -> Iterator[Row]:
    return open_rows(SourceConfig(source=file, split=file_split), split, f"data.{split}", LoadContext())


def _database(folder: Path, db_id: Any, where: str) -> Path:
    file = folder / str(db_id) / f"{db_id}.sqlite"
    if not file.is_file():
        raise DataError(f"{where}: no database {str(file)!r}; correct the option databases, or fetch it")
    return file


def _text(row: Any, where: str, *keys: str) -> str:
    """Return the first of these keys in the row, a text."""
    for key in keys:
        if isinstance(row, Mapping) and isinstance(row.get(key), str):
            return str(row[key])
    raise DataError(f"{where}: needs {' or '.join(keys)}, a text; it is {row!r:.200}")


@cache
def _schema(database: Path) -> str:
    """Return the CREATE statements of a database's tables, indices and views."""
    try:
        rows = SANDBOX.select(Query(Database(database), _SCHEMA, _PATIENCE), _MOST_STATEMENTS)
    except TrajectoryFailure as error:
        raise DataError(f"{error.message}; fetch it again") from error
    return "\n".join(f"{statement};" for (statement,) in rows)
