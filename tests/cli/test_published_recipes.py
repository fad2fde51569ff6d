"""The recipes of GSM8K: they read the data set, the published ones have SkyRL's settings, and an update is made."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.worlds import treadle
from tests.runs import MODEL, SETTINGS
from tests.worlds import ROOT
from treadle.core.types import Task
from treadle.envs.gsm8k import INSTRUCTION
from treadle.plan.config import load_recipe
from treadle.plan.inputs import load_data
from treadle.plan.validation import check_settings

ROW = {"question": "How many clips?", "answer": "24 + 48 = 1,072 clips.\n#### 1,072"}
BUILD = {**(load_recipe("sql-small").model.build or {}), "max_position_embeddings": 32_000}
SMALL = (f"model={json.dumps({'path': None, 'build': BUILD, 'tokenizer': 'sql-small'})}", "engine={}")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data set, of one question a split, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    for split in ("train", "test"):
        (tmp_path / "data/gsm8k" / f"{split}.jsonl").write_text(json.dumps(ROW) + "\n")
    return tmp_path


def first_task(recipe: str, *overrides: str) -> Task:
    config = load_recipe(recipe, overrides)
    check_settings(config)
    inputs = load_data(config)
    assert len(inputs.train) == len(inputs.held_out) == 1
    return inputs.train[0]


def test_the_files_of_skyrl_are_read_too(folder: Path) -> None:
    for split in ("train", "validation"):
        row: dict[str, Any] = {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"How many clips? {INSTRUCTION}"}],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": "1072"},
            "extra_info": {"split": split, "index": 0, "answer": ROW["answer"], "question": ROW["question"]},
        }
        (folder / "skyrl").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist([row]), folder / "skyrl" / f"{split}.parquet")
    sources = ("data.train={source: skyrl/train.parquet}", "data.held_out={source: skyrl/validation.parquet}")
    task = first_task("gsm8k", *sources, "data.columns.ground_truth=reward_spec.ground_truth")
    own = first_task("gsm8k")
    assert (task.prompt, task.ground_truth) == (own.prompt, own.ground_truth)


@pytest.mark.parametrize("recipe", ["smollm2-gsm8k", "smollm2-gsm8k-multi-turn"])
def test_an_update_is_made(folder: Path, recipe: str) -> None:
    short = ["training.tasks_per_update=1", "training.group_size=2", "training.threads=1", "orchestration.updates=1"]
    done = treadle("train", recipe, "--name", "short", *SMALL, *short, "rollout.max_completion_tokens=4")
    assert done.status == 0, done.err
    rows = [json.loads(line) for line in (folder / "runs/short/metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if row["kind"] == "update"]
    assert (row["trajectories"], row["failed"], row["reward_mean"]) == (2, 0, 0.0)
    assert row["steps_mean"] == (5 if "multi" in recipe else 1)


def test_the_program_of_the_documentation_trains(folder: Path) -> None:
    page = (ROOT / "docs" / "gsm8k.md").read_text(encoding="utf-8")
    program = page.split("```python\n", 1)[1].split("```", 1)[0]
    program = program.replace('"smollm2"', repr(MODEL)).replace("settings=settings", f"settings={SETTINGS} | settings")
    (folder / "data/gsm8k/train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 8)
    exec(program, {})
    assert (folder / "runs/gsm8k/summary.json").is_file()


@pytest.mark.parametrize("recipe", ["gsm8k", "gsm8k-multi-turn"])
def test_the_published_recipes_pass_a_dry_run(recipe: str) -> None:
    done = treadle("train", recipe, "--dry-run", *SMALL)
    assert done.status == 0 and "How many clips?" in done.out, done.out
    missing = treadle("train", recipe, "--dry-run", *SMALL, "data.train.options.file=nowhere.jsonl")
    assert missing.status == 1 and "nowhere.jsonl" in missing.out


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


def test_sql_small_makes_an_update(folder: Path) -> None:
    done = treadle("train", "sql-small", "--name", "short", *SHORT)
    assert done.status == 0, done.err
    summary = json.loads((folder / "runs" / "short" / "summary.json").read_text())
    assert summary["updates"] == 1 and set(summary["evaluations"][-1]["by"]) == {"1", "2"}
    assert summary["evaluations"][-1]["failed"] == 0


_COMPACTED = (
    "rollout.compaction={at: 60, keep_last: 0, prompt: 'What is seen?', max_tokens: 12}",
    *("rollout.max_steps=8", "warm_start.options.summaries=true"),
)


@pytest.mark.parametrize("more", [(), _COMPACTED, ("environment_options.blind=true", "warm_start.options.blind=true")])
def test_look_small_makes_an_update(folder: Path, more: tuple[str, ...]) -> None:
    pytest.importorskip("PIL")
    done = treadle("train", "look-small", "--name", "short", *SHORT, "orchestration.max_staleness=2", *more)
    assert done.status == 0, done.err
    summary = json.loads((folder / "runs" / "short" / "summary.json").read_text())
    assert summary["updates"] == 1 and set(summary["evaluations"][-1]["by"]) == {"2", "3"}
    assert summary["evaluations"][-1]["failed"] == 0


def test_qwen3_vl_look_passes_a_dry_run(folder: Path) -> None:
    pytest.importorskip("PIL")
    from tests.seeing import write

    model = write(folder / "model", "qwen3_vl")
    done = treadle("train", "qwen3-vl-look", "--dry-run", f"model.path={model}")
    assert done.status == 0 and "There are six rooms" in done.out, done.out


def test_skyrl_sql_fits_its_data(folder: Path) -> None:
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
    check_settings(load_recipe("skyrl-sql"))  # with vLLM, whose filters need a top_k
    missing = treadle("train", "skyrl-sql", "--dry-run", "data.train.options.file=nowhere.parquet", "engine={}")
    assert missing.status == 1 and "nowhere.parquet" in missing.out
