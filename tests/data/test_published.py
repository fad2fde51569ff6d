"""The published layouts of text-to-SQL, made small: SkyRL-SQL-653, Spider and BIRD."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
import pytest

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.data.config import SourceConfig
from treadle.data.load import LoadContext
from treadle.data.load import load_tasks as load
from treadle.envs.sql.environment import TextToSql

GOLD = "SELECT name FROM city"
ROW: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "Which cities are there?"}],
    "db_id": "geo",
    "data": "synsql",
    "reward_spec": {"ground_truth": GOLD, "method": "rule"},
    "env_class": "text2sql",
    "extra_info": {"index": 3},
}


def make_database(folder: Path, name: str = "geo") -> Path:
    """`folder/geo/geo.sqlite`, with a text that is no UTF-8, as BIRD has some."""
    file = folder / name / f"{name}.sqlite"
    file.parent.mkdir(parents=True)
    with closing(sqlite3.connect(file)) as database:
        database.executescript("CREATE TABLE city (name TEXT, size REAL); CREATE INDEX by_size ON city (size)")
        database.execute("INSERT INTO city VALUES (CAST(x'526f6dff' AS TEXT), 2.8)")
        database.commit()
    return file


def load_tasks(source: str, **options: Any) -> list[Task]:
    section = SourceConfig(source=source, options={key: str(value) for key, value in options.items()})
    return list(load(section, "train", LoadContext()))


def success(task: Task, sql: str) -> float:
    environment = TextToSql()
    environment.reset(task)
    reward = environment.step(f"<think></think><solution>{sql}</solution>").reward
    assert isinstance(reward, float)
    return reward


def test_the_rows_of_skyrl_sql(tmp_path: Path) -> None:
    files = {
        "synsql": make_database(tmp_path / "SynSQL-2.5M" / "databases"),
        "spider": make_database(tmp_path / "spider" / "database"),
        "bird": make_database(tmp_path / "bird" / "train" / "train_databases"),
    }
    pq.write_table(pyarrow.Table.from_pylist([ROW | {"data": name} for name in files]), tmp_path / "train.parquet")
    tasks = load_tasks("skyrl_sql", file=tmp_path / "train.parquet", databases=tmp_path)
    assert [task.task_id for task in tasks] == [f"train-{n:06d}" for n in range(3)]
    for task, (name, file) in zip(tasks, files.items(), strict=True):
        assert task.prompt == tuple(ROW["prompt"]) and task.environment == "text_to_sql" and task.ground_truth == GOLD
        assert task.extras == {"db_id": "geo", "data": name, "database": str(file)}
        assert success(task, GOLD) == 1 and success(task, "SELECT 'Rom'") == 0


@pytest.mark.parametrize(
    ("file", "row"),
    [
        ("train_spider.json", {"db_id": "geo", "question": "Which?", "query": GOLD, "query_toks": ["SELECT"]}),
        ("train.json", {"db_id": "geo", "question": "Which?", "SQL": GOLD, "evidence": "size is in millions"}),
        ("dev.json", {"question_id": 7, "db_id": "geo", "question": "Which?", "SQL": GOLD, "difficulty": "simple"}),
    ],
    ids=["Spider", "BIRD's train", "BIRD's dev"],
)
def test_the_questions_of_spider_and_bird(tmp_path: Path, file: str, row: dict[str, Any]) -> None:
    database = make_database(tmp_path / "databases")
    (tmp_path / file).write_text(json.dumps([row]))
    [task] = load_tasks("sql_questions", file=tmp_path / file, databases=tmp_path / "databases")
    assert task.task_id == f"{Path(file).stem}-000000" and task.extras["database"] == str(database)
    assert task.extras.get("difficulty") == row.get("difficulty")
    system, user = task.prompt
    assert "<solution>" in system["content"]
    known = f"Known:\n{row['evidence']}\n\n" if "evidence" in row else ""
    schema = "CREATE TABLE city (name TEXT, size REAL);\nCREATE INDEX by_size ON city (size);"
    assert user["content"] == f"Schema:\n{schema}\n\n{known}Question:\nWhich?"
    assert success(task, GOLD) == 1 and success(task, "SELECT size FROM city") == 0


def questions(folder: Path, text: str) -> dict[str, Path]:
    make_database(folder)
    (folder / "broken").mkdir()
    (folder / "broken" / "broken.sqlite").write_text("no database " * 99)
    (folder / "a.json").write_text(text)
    return {"file": folder / "a.json", "databases": folder}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must be a JSON array of questions"),
        ("[", "not JSON"),
        ("[1]", "question 0 (counted from 0): needs db_id, a text; it is 1"),
        ('[{"db_id": "geo", "question": "Which?"}]', "needs query or SQL, a text"),
        ('[{"db_id": "sea", "question": "Which?", "SQL": "x"}]', "sea/sea.sqlite'; correct the option databases"),
        ('[{"db_id": "broken", "question": "Which?", "SQL": "x"}]', "broken.sqlite is not a database: file is not"),
    ],
)
def test_questions_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        load_tasks("sql_questions", **questions(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "wikisql"}, "row 0 (counted from 0): data is 'wikisql'; it must be one of synsql, spider, bird"),
        ({"db_id": "sea"}, "SynSQL-2.5M/databases/sea/sea.sqlite'; correct the option databases, or fetch it"),
        ({"reward_spec": {"method": "rule"}}, "data.columns.ground_truth is 'reward_spec.ground_truth', but"),
    ],
)
def test_rows_that_are_none_of_skyrl_sql(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    make_database(tmp_path / "SynSQL-2.5M" / "databases")
    pq.write_table(pyarrow.Table.from_pylist([ROW | change]), tmp_path / "train.parquet")
    with pytest.raises(DataError) as caught:
        load_tasks("skyrl_sql", file=tmp_path / "train.parquet", databases=tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("source", ["gsm8k_questions", "skyrl_sql"])
def test_of_a_directory_of_several_splits_the_sources_split_is_taken(tmp_path: Path, source: str) -> None:
    """As the error says that names them: `data.train.split=test` is what picks one."""
    make_database(tmp_path / "SynSQL-2.5M" / "databases")
    files = tmp_path / "files"
    files.mkdir()
    for name in ("train", "test"):
        row = {"question": f"{name}?", "answer": "#### 2"} if source == "gsm8k_questions" else ROW
        (files / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    options = {"file": str(files)} | ({"databases": str(tmp_path)} if source == "skyrl_sql" else {})

    def ids(split: str | None) -> list[str]:
        section = SourceConfig(source=source, split=split, options=options)
        return [task.task_id for task in load(section, "train", LoadContext())]

    choices = r"in .*; choose one of test, train, all"
    with pytest.raises(ConfigError, match=rf"data\.train\.split: it holds several splits {choices}"):
        ids(None)
    assert ids("test") == ["files/test-000001", "files/test-000002"]
    assert ids("test[:50%]") == ["files/test-000001"]
    assert len(ids("all")) == 4
    with pytest.raises(ConfigError, match=rf"data\.train\.split: there is no split 'dev' {choices}"):
        ids("dev")
    options["file_split"] = "test"
    with pytest.raises(ConfigError, match=r"write data\.train\.split=test in place of 'file_split'"):
        ids(None)
