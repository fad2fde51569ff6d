"""Tasks of Parquet files and of `datasets`: read row by row, checked as a whole beforehand."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.config import build
from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.data.config import Columns, SourceConfig
from treadle.data.load import LoadContext
from treadle.data.load import load_tasks as load
from treadle.data.rows import Row, make_task
from treadle.data.table import is_well_formed
from treadle.data.tasks import LazyTasks, players, task_ids, tasks_sha256

PLAYER = ("environment", "arithmetic")
VERL = {"prompt": "prompt", "ground_truth": "reward_model.ground_truth", "extras": {"level": "extra_info.level"}}


def load_tasks(source: Any, **section: Any) -> Sequence[Task]:
    context = LoadContext(player=section.pop("player", PLAYER), environments=section.pop("environments", {}))
    return load(build(SourceConfig, {"source": str(source), **section}), "train", context)


def verl(count: int, start: int = 0) -> pa.Table:
    """Rows as they are stored for other trainers."""
    return pa.table(
        {
            "data_source": ["x"] * count,
            "prompt": [[{"role": "user", "content": f"question {n}"}] for n in range(start, start + count)],
            "reward_model": [{"style": "rule", "ground_truth": str(n)} for n in range(start, start + count)],
            "extra_info": [{"level": n % 3, "image": b"\xff"} for n in range(start, start + count)],
        }
    )


def write(path: Path, table: Any, **options: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table if isinstance(table, pa.Table) else pa.Table.from_pylist(table), path, **options)
    return path


@pytest.mark.parametrize("group", [7, 100_000])
def test_rows_are_tasks_whatever_their_row_groups(tmp_path: Path, group: int) -> None:
    file = write(tmp_path / "math.parquet", verl(3000), row_group_size=group)
    tasks = load_tasks(file, columns=VERL)
    assert isinstance(tasks, LazyTasks)
    assert len(tasks) == 3000
    for number in (0, 1, 1023, 1024, 2999, -1):
        n = number % 3000
        prompt = ({"role": "user", "content": f"question {n}"},)
        assert tasks[number] == Task(f"math-{n:06d}", prompt, "arithmetic", str(n), {"level": n % 3})  # type: ignore[arg-type]
    assert [task.ground_truth for task in tasks[2998:]] == ["2998", "2999"]
    assert [task.task_id for task in tasks] == list(task_ids(tasks))
    assert players(tasks) == {PLAYER}
    with pytest.raises(IndexError):
        tasks[3000]


def test_columns_of_treadles_own_names_need_no_mapping(tmp_path: Path) -> None:
    rows = [
        {"task_id": "a", "prompt": "Hi", "ground_truth": [1, 2], "extras": {"k": 1}, "environment": "lookup"},
        {"task_id": "b", "prompt": "Ho", "ground_truth": None, "extras": None, "environment": None},
    ]
    tasks = load_tasks(write(tmp_path / "a.parquet", rows))
    assert [(t.task_id, t.environment, t.ground_truth, dict(t.extras)) for t in tasks] == [
        ("a", "lookup", [1, 2], {"k": 1}),
        ("b", "arithmetic", None, {}),
    ]
    assert players(tasks) == {("environment", "lookup"), PLAYER}


def test_a_directory_is_one_data_set_or_several_splits(tmp_path: Path) -> None:
    write(tmp_path / "math" / "train-00000-of-00002.parquet", verl(2))
    write(tmp_path / "math" / "train-00001-of-00002.parquet", verl(3, start=2))
    assert [t.ground_truth for t in load_tasks(tmp_path / "math", columns=VERL)] == ["0", "1", "2", "3", "4"]
    write(tmp_path / "math" / "test.parquet", verl(1, start=9))
    with pytest.raises(
        ConfigError, match=r"data\.train\.split: it holds several splits in .*; choose one of test, train, all"
    ):
        load_tasks(tmp_path / "math", columns=VERL)
    with pytest.raises(ConfigError, match=r"there is no split 'dev' in .*; choose one of test, train, all"):
        load_tasks(tmp_path / "math", columns=VERL, split="dev")
    assert len(load_tasks(tmp_path / "math", columns=VERL, split="all")) == 6
    tasks = load_tasks(tmp_path / "math", columns=VERL, split="train[1:-1]")
    assert (
        list(task_ids(tasks))
        == [t.task_id for t in tasks]
        == ["math/train-00000-of-00002-000001", "math/train-00001-of-00002-000000", "math/train-00001-of-00002-000001"]
    )


def test_the_digest_tells_other_data(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", verl(5))
    first = tasks_sha256(load_tasks(file, columns=VERL))
    assert tasks_sha256(load_tasks(file, columns=VERL)) == first
    assert tasks_sha256(load_tasks(file, columns=VERL, split="[:4]")) != first
    write(file, verl(5, start=1))
    assert tasks_sha256(load_tasks(file, columns=VERL)) != first


# ---- wrong input


def rows(*changed: dict[str, Any], count: int = 5) -> list[dict[str, Any]]:
    good = [{"question": f"q{n}", "answer": {"value": str(n)}, "id": f"t{n}"} for n in range(count)]
    return [*good, *changed]


GOOD = {"role": "user", "content": "x"}
QA = {"prompt": "question", "ground_truth": "answer.value"}
BAD_ROWS: list[tuple[Any, dict[str, Any] | None, str]] = [
    (rows({"question": None, "answer": {"value": "x"}}), QA, "row 5 .*: prompt must be text .*got None"),
    (rows({"question": "", "answer": {"value": "x"}}), QA, "row 5 .*: no prompt, and environment 'arithmetic'"),
    (
        rows({"question": "q", "answer": None}),
        QA,
        "row 5 .*columns.ground_truth is 'answer.value', but 'answer' is None",
    ),
    (rows({"question": "q"}), {**QA, "task_id": "id"}, "row 5 .*data.columns.ground_truth"),
    (rows(*rows(count=1)), {**QA, "task_id": "id"}, "task_id 't0' belongs to both task 0 and task 5"),
    (rows(), {"prompt": "qestion"}, "no column 'qestion': the file has question, answer, id; correct data.columns"),
    (rows(), {**QA, "ground_truth": "answer.valeu"}, "no column 'answer.valeu': 'answer' has value; correct"),
    (rows(), {**QA, "ground_truth": "question.x"}, "no column 'question.x': 'question' is of type string; correct"),
    (rows(), {**QA, "extras": "question"}, "row 0 .*: extras must be a JSON object, got 'q0'"),
    (rows(), {**QA, "prompt": "answer"}, "row 0 .*: prompt must be text or a JSON array of messages, got {'value'"),
    (rows(), None, "unknown key 'question'; keys are .*data.columns.prompt=question"),
    (rows(), {}, r"none of its columns is used \(question, answer, id\); set data.columns.prompt"),
    ([{"question": "q", "answer": b"\xff"}], {**QA, "ground_truth": "answer"}, "row 0 .*plain JSON data"),
    ([{"prompt": [{"role": "user"}]}], None, "row 0 .*: prompt: message 0 needs 'role' and 'content'"),
    ([{"prompt": [{"role": "user", "content": "x", "weight": 1.0}]}], None, "row 0 .*unknown keys .'weight'"),
    ([{"prompt": [GOOD]}, {"prompt": [{"role": "user", "content": None}]}], None, "row 1 .*: prompt"),
    ([{"prompt": [GOOD]}, {"prompt": []}], None, "row 1 .*: no prompt"),
    ([{"prompt": "x", "task_id": ""}], None, "row 0 .*: task_id must not be empty"),
    ([{"prompt": "x", "agent": "a", "driver": "b"}], None, "row 0 .*: names both"),
]


@pytest.mark.parametrize(("table", "columns", "message"), BAD_ROWS)
def test_what_is_wrong_is_told_with_file_and_row(tmp_path: Path, table: Any, columns: Any, message: str) -> None:
    file = write(tmp_path / "a.parquet", table)
    with pytest.raises((DataError, ConfigError), match=rf"a\.parquet: .*{message}|a\.parquet: {message}") as caught:
        load_tasks(file, columns=columns)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf8_is_told_with_its_row(tmp_path: Path) -> None:
    values = [b"good"] * 1500 + [b"caf\xe9"]
    text = pa.Array.from_buffers(pa.string(), len(values), pa.array(values).buffers())
    file = write(tmp_path / "a.parquet", pa.table({"prompt": text}))
    with pytest.raises(DataError, match=r"a\.parquet: row 1500 \(counted from 0\): not UTF-8: .*; write the file"):
        load_tasks(file)


def test_files_that_are_no_parquet_empty_or_of_other_types(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train\.source: cannot read .*no\.parquet: No such file"):
        load_tasks(tmp_path / "no.parquet")
    (tmp_path / "a.parquet").write_text("{}")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet: .*; write the file again"):
        load_tasks(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet"):
        load_tasks(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"b\.parquet has no tasks"):
        load_tasks(write(tmp_path / "b.parquet", verl(1).slice(0, 0)), columns=VERL)
    write(tmp_path / "c" / "0.parquet", [{"prompt": "x", "ground_truth": "1"}])
    write(tmp_path / "c" / "1.parquet", [{"prompt": "x", "ground_truth": 1}])
    with pytest.raises(
        DataError, match=r"1\.parquet: column 'ground_truth' is of type int64, and of type .*string in .*0\."
    ):
        load_tasks(tmp_path / "c")
    write(tmp_path / "c" / "1.parquet", [{"prompt": "x"}])
    with pytest.raises(ConfigError, match=r"1\.parquet: no column 'ground_truth': the file has prompt"):
        load_tasks(tmp_path / "c")
    (tmp_path / "c" / "1.parquet").unlink()
    with pytest.raises(ConfigError, match="takes no options, got count"):
        load_tasks(tmp_path / "c", options={"count": 1})
    (tmp_path / "c" / "a.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"several splits|holds .jsonl and .parquet files"):
        load_tasks(tmp_path / "c")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", verl(3000), compression="zstd")
    content = bytearray(file.read_bytes())
    content[40:400] = bytes(360)
    file.write_bytes(content)
    with pytest.raises((DataError, ConfigError), match=r"a\.parquet"):
        load_tasks(file, columns=VERL)


# ---- the quick check never passes what is wrong

MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", None]), "content": st.none() | st.text(max_size=2)},
    optional={"name": st.none() | st.just("x"), "weight": st.none() | st.just("y")},
)
ROW = st.fixed_dictionaries(
    {
        "prompt": st.none() | st.lists(MESSAGE, max_size=2),
        "task_id": st.none() | st.text(max_size=2),
        "reward_model": st.none() | st.fixed_dictionaries({"ground_truth": st.none() | st.text(max_size=2)}),
        "extras": st.none() | st.fixed_dictionaries({"level": st.none() | st.integers(0, 3)}),
    }
)
TEXT_ROW = st.fixed_dictionaries(
    {"prompt": st.none() | st.text(max_size=2), "reward_model": st.none() | st.just({"ground_truth": "x"})}
)


@given(table=st.lists(ROW, min_size=1, max_size=4) | st.lists(TEXT_ROW, min_size=1, max_size=4))
def test_a_batch_that_passes_whole_has_only_rows_that_are_tasks_with_prompts(table: list[dict[str, Any]]) -> None:
    columns: Columns = {"ground_truth": "reward_model.ground_truth"}
    batch = pa.Table.from_pylist(table).combine_chunks().to_batches()[0]
    paths = {name: name for name in batch.schema.names if name != "reward_model"}
    paths["ground_truth"] = "reward_model.ground_truth"
    try:
        certain = is_well_formed(batch, paths)
    except KeyError:  # an object of which no row has the key
        certain = False
    if certain:
        for row in batch.to_pylist():
            assert make_task(Row(row, "row", "id"), columns).prompt


# ---- Hugging Face


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    found = datasets.DatasetDict(train=datasets.Dataset(verl(5)), test=datasets.Dataset(verl(2, start=5)))
    found.save_to_disk(tmp_path / "math")
    return tmp_path / "math"


def test_a_saved_data_set(saved: Path) -> None:
    tasks = load_tasks(saved, columns=VERL, split="test")
    assert [(t.task_id, t.ground_truth) for t in tasks] == [("math-test-000000", "5"), ("math-test-000001", "6")]
    assert tasks_sha256(tasks) != tasks_sha256(load_tasks(saved, columns=VERL, split="train"))
    assert [t.ground_truth for t in load_tasks(saved / "train", columns=VERL)] == list("01234")
    assert len(load_tasks(saved, columns=VERL, split="train[:40%]")) == 2
    with pytest.raises(ConfigError, match=r"it has several splits in .*; choose one of train, test"):
        load_tasks(saved, columns=VERL)
    with pytest.raises(ConfigError, match=r"there is no split 'dev' in .*; choose one of train, test"):
        load_tasks(saved, columns=VERL, split="dev")
    with pytest.raises(ConfigError, match="takes no options; remove name"):
        load_tasks(saved, columns=VERL, options={"name": "main"})
    with pytest.raises(ConfigError, match="math, split test: no column 'x': the file has data_source, prompt"):
        load_tasks(saved, columns={"prompt": "x"}, split="test")


def test_a_name_on_the_hub(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = {}

    def load_dataset(source: str, **options: Any) -> Any:
        asked[source] = options
        return datasets.load_from_disk(str(saved))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tasks = load_tasks("org/math", columns=VERL, split="train", options={"name": "main", "revision": "v1"})
    assert asked == {"org/math": {"name": "main", "revision": "v1"}}
    assert tasks[0].task_id == "math-train-000000"
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda source, streaming: datasets.IterableDatasetDict(train=datasets.Dataset(verl(1)).to_iterable_dataset()),
    )
    with pytest.raises(ConfigError, match=r"data\.train\.options: 'org/math' was opened as a stream"):
        load_tasks("org/math", columns=VERL, options={"streaming": True})
    with pytest.raises(ConfigError, match=r"'split' is not an option; write data\.train\.split=train"):
        load_tasks("org/math", columns=VERL, options={"split": "train"})


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ConnectionError("Couldn't reach 'org/math' on the Hub\nmore"),
            "no file, directory or cached data set 'org/math', and the hub cannot be",
        ),
        (ValueError("Config name is missing\nmore"), "the hub's data set cannot be loaded: Config name is missing;"),
    ],
)
def test_a_name_that_cannot_be_loaded_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(source: str, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConfigError, match=message) as caught:
        load_tasks("org/math")
    assert "\n" not in str(caught.value)


def test_offline_a_name_is_given_up_at_once(tmp_path: Path) -> None:
    program = "from treadle.data.table import open_data_set; open_data_set('org/math', '', {}, 'data.train')"
    ours = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **ours}, capture_output=True, text=True, timeout=300, check=False)
    assert "Retrying in" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "data.train.source: no file, directory or cached data set 'org/math', and the hub" in last


@pytest.mark.slow
def test_a_million_rows_do_not_lie_in_memory() -> None:
    command = [sys.executable, "-m", "benchmarks.large_data", "--rows", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tasks"] == 1_000_000
    assert found["file_megabytes"] > 300  # of which memory never holds all
    assert found["megabytes"] < 300
