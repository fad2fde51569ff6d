"""The recipes of text-to-SQL: `sql-small` trains, `skyrl-sql` has the published settings and fits its data."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest

from tests.cli.worlds import treadle
from treadle.data.config import sources_of
from treadle.envs.sql.small import MAX_TURNS
from treadle.orchestration.config import load_recipe

SHORT = (
    "data.train.options.count=8",
    "data.held_out.options.count=4",
    "warm_start.steps=2",
    "warm_start.batch_size=4",
    "warm_start.max_loss=99",
    "training.tasks_per_update=4",
    "training.group_size=2",
    "training.threads=1",
    "rollout.max_completion_tokens=6",
    "orchestration.updates=1",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_sql_small_makes_an_update(folder: Path) -> None:
    done = treadle("train", "sql-small", "--name", "short", *SHORT)
    assert done.status == 0, done.err
    summary = json.loads((folder / "runs" / "short" / "summary.json").read_text())
    assert summary["updates"] == 1 and set(summary["evaluations"][-1]["by"]) == {"1", "2"}
    assert summary["evaluations"][-1]["failed"] == 0


def test_sql_small_plays_enough_of_both_hop_counts_with_half_a_second_for_a_query() -> None:
    config = load_recipe("sql-small")
    assert config.data.held_out is not None
    train, held_out = (sources_of(section)[0].options["count"] for section in (config.data.train, config.data.held_out))
    assert held_out >= 2 * 512 and train >= config.orchestration.updates * config.training.tasks_per_update
    assert config.environment_options == {
        "max_turns": MAX_TURNS,
        "operations": 20_000_000,
        "query_seconds": 30.0,
        "grading_seconds": 30.0,
    }
    assert config.rollout.max_steps == MAX_TURNS
    assert config.data.table_by == "hops" and config.warm_start is not None and config.warm_start.max_loss is not None


def test_skyrl_sql_is_as_published() -> None:
    config = load_recipe("skyrl-sql")
    rollout, training, algorithm = config.rollout, config.training, config.algorithm
    assert config.environment_options == {"max_turns": 6, "query_seconds": 5.0, "grading_seconds": 30.0}
    assert (rollout.max_steps, rollout.max_input_tokens, rollout.max_completion_tokens) == (6, 29_000, 3_000)
    assert (rollout.temperature, rollout.top_p, rollout.stop) == (0.6, 0.95, ("</sql>", "</solution>"))
    assert (training.tasks_per_update, training.group_size, training.optimizer.learning_rate) == (256, 5, 1e-6)
    assert (algorithm.policy_loss, algorithm.policy_loss_options["dual_clip"], algorithm.kl) == ("ppo_clip", 3.0, None)
    assert not algorithm.correction.active


def test_skyrl_sql_fits_its_data(folder: Path) -> None:
    """With a small model, and a question of each source."""
    rows = []
    for data, place in (("synsql", "SynSQL-2.5M/databases"), ("spider", "spider/database")):
        file = folder / "data/sql/db_files/data" / place / "geo" / "geo.sqlite"
        file.parent.mkdir(parents=True)
        with closing(sqlite3.connect(file)) as database:
            database.execute("CREATE TABLE city (name TEXT)")
        prompt = [{"role": "user", "content": f"Which cities of {data}?"}]
        rows.append({"prompt": prompt, "db_id": "geo", "data": data, "reward_spec": {"ground_truth": "SELECT 1"}})
    for split, row in zip(("train", "validation"), rows, strict=True):
        pq.write_table(pyarrow.Table.from_pylist([row]), folder / "data/sql" / f"{split}.parquet")
    build = {**(load_recipe("sql-small").model.build or {}), "max_position_embeddings": 32_000}
    small = {"path": None, "build": build, "tokenizer": "sql-small"}
    done = treadle("train", "skyrl-sql", "--dry-run", f"model={json.dumps(small)}", "engine={}")
    assert done.status == 0, done.out
    assert "Which cities of synsql?" in done.out
    missing = treadle("train", "skyrl-sql", "--dry-run", "data.train.options.file=nowhere.parquet", "engine={}")
    assert missing.status == 1 and "nowhere.parquet" in missing.out
