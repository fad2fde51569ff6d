"""Training on data sets: reward functions by name, mixtures, and resuming with the same tasks."""

import json
import runpy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import treadle
from tests.runs import MODEL, SETTINGS, check_finished, query, resume
from tests.worlds import ROOT, Quiet, tiny
from treadle.cli.main import main
from treadle.core.config import build
from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.plan.config import RunConfig
from treadle.plan.inputs import load_inputs

HERE = "tests.plan.test_data"


def shortness(task: Task, text: str) -> float:
    assert task.ground_truth is not None
    return 1 / (1 + len(text))


async def later(task: Task, text: str) -> treadle.Reward:
    return treadle.Reward({"short": shortness(task, text)})


def wrong(task: Task, text: str) -> float:
    return float(task.extras["level"])


async def wrong_later(task: Task, text: str) -> float:
    return wrong(task, text)


def silent(task: Task, text: str) -> Any:
    return None


def questions(path: Path, count: int = 6, start: int = 0) -> str:
    rows = [{"question": f"be brief {n}", "meta": {"answer": n}} for n in range(start, start + count)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def recipe(source: str, **more: Any) -> RunConfig:
    columns = {"prompt": "question", "ground_truth": "meta.answer"}
    data = {"train": {"source": source}, "columns": columns, **more.pop("data", {})}
    base = {**json.loads(tiny().model_dump_json()), "environment": "", "reward": f"{HERE}:shortness", "data": data}
    return build(RunConfig, {**base, **more})


def train(path: Path, config: RunConfig) -> dict[str, Any]:
    from treadle.api.train import train_run

    return train_run(config, load_inputs(config), path, Quiet())


def test_data_a_reward_and_a_model_are_a_program_of_eight_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in docs/data.md, on a model that need not be downloaded."""
    rows = [{"question": f"be brief {n}", "answer": str(n), "other": n} for n in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    program = page.split("```python\n", 1)[1].split("```", 1)[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 8
    program = program.replace('"smollm2"', repr(MODEL)).replace(
        "settings=settings", f"settings={SETTINGS!r} | settings"
    )
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("program.py", run_name="__main__")
    check_finished(tmp_path / "runs" / "first")
    [row] = query(tmp_path / "runs" / "first", "SELECT DISTINCT status FROM trajectories")
    assert row["status"] == "done"


def test_a_reward_function_by_name_trains_as_the_function_does(tmp_path: Path) -> None:
    source = questions(tmp_path / "train.jsonl")
    config = recipe(source)
    by_name = train(tmp_path / "name", config)["weights_sha256"]
    assert train(tmp_path / "later", recipe(source, reward=f"{HERE}:later"))["weights_sha256"] == by_name
    parquet = questions(tmp_path / "train.parquet")
    assert train(tmp_path / "parquet", recipe(parquet))["weights_sha256"] == by_name
    sections = json.loads(config.model_dump_json())
    own = ("recipe", "environment", "reward", "agent", "driver", "data", "model", "warm_start")
    settings = {name: section for name, section in sections.items() if name not in own}
    settings["data.columns"] = sections["data"]["columns"]
    model = config.model.model_dump(exclude_none=True)
    given = treadle.train(shortness, source, model=model, run=tmp_path / "python", settings=settings, progress=Quiet())
    assert given["weights_sha256"] == by_name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", "reward: 'nope' is not registered"),
        (f"{HERE}:HERE", "is of type str, it must be a function: reward"),
        ("treadle.core.types:Task", "is a class, it must be a function"),
        (f"{HERE}:questions", None),
        ("json:dumps", r"is called as reward\(task, text\), but: too many positional"),
    ],
)
def test_what_is_no_reward_function_is_refused_at_once(tmp_path: Path, name: str, message: str | None) -> None:
    config = recipe(questions(tmp_path / "train.jsonl"), reward=name)
    if message is None:
        load_inputs(config)
        return
    with pytest.raises(ConfigError, match=message):
        load_inputs(config)


@pytest.mark.parametrize(("name", "frames"), [("wrong", ["wrong"]), ("wrong_later", ["wrong_later", "wrong"])])
def test_its_traceback_is_kept_and_shown_from_its_own_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, frames: list[str]
) -> None:
    config = recipe(questions(tmp_path / "train.jsonl"), reward=f"{HERE}:{name}")
    why = r"the reward function raised KeyError: 'level' \(.*test_data.py, line \d+\)"
    with pytest.raises(treadle.TreadleError, match=why):
        train(tmp_path / "run", config)
    [row] = query(tmp_path / "run", "SELECT failure_traceback FROM trajectories LIMIT 1")
    lines = row["failure_traceback"].splitlines()
    assert lines[0].startswith("Traceback") and lines[-1] == "KeyError: 'level'"
    assert [line.rpartition(" in ")[2] for line in lines if line.startswith("  File")] == frames
    assert "test_data.py" in lines[1]
    assert main(["report", str(tmp_path / "run"), "--failures"]) == 0
    assert 'float(task.extras["level"])' in capsys.readouterr().out


def test_a_mixture_trains_by_weight_and_its_sources_have_tables(tmp_path: Path) -> None:
    parts = [
        {"source": questions(tmp_path / "a.jsonl"), "weight": 3},
        {"source": questions(tmp_path / "b.parquet", start=50)},
    ]
    config = recipe("", data={"train": parts, "table_by": "source"})
    train(tmp_path / "run", config)
    check_finished(tmp_path / "run")
    groups = query(tmp_path / "run", "SELECT task, position, epoch FROM groups ORDER BY idx")
    sources = [json.loads(row["task"])["extras"]["source"] for row in groups]
    assert sources.count("a") == pytest.approx(0.75 * len(sources), abs=1)


# ---- resuming


@pytest.mark.quick(1)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_run_goes_on_with_the_same_data_and_with_no_other(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"train{suffix}"
    config = recipe(questions(file))
    orchestration = config.orchestration.model_copy(update={"updates": 1})
    first = config.model_copy(update={"orchestration": orchestration})
    train(tmp_path / "run", first)
    train(tmp_path / "other", first)
    expected = resume(tmp_path / "other", config=config)["weights_sha256"]
    questions(file, start=1)
    with pytest.raises(DataError, match=r"data\.train has changed since the run was started \(6 other tasks\)"):
        resume(tmp_path / "run", config=config)
    questions(file, count=7)
    with pytest.raises(DataError, match=r"started \(6 tasks, now 7\), but the run's cursor counts .*; restore"):
        resume(tmp_path / "run", config=config)
    questions(file)
    assert resume(tmp_path / "run", config=config)["weights_sha256"] == expected
