"""Several sources in one, visited by weight, the same for the same seed."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.core.config import build
from treadle.core.errors import ConfigError
from treadle.core.types import Task
from treadle.data.config import DataConfig
from treadle.data.load import LoadContext, load_tasks
from treadle.data.tasks import Mixture, players, task_ids, tasks_sha256
from treadle.loop.task_queue import TaskOrder


def tasks(name: str, count: int) -> list[Task]:
    return [Task(f"{name}{n}", environment="e") for n in range(count)]


def mixture(sizes: list[int], weights: list[float]) -> Mixture:
    names = [f"s{n}" for n in range(len(sizes))]
    return Mixture(names, [tasks("t", size) for size in sizes], weights)


def write(path: Path, *rows: dict[str, Any]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_mixture_of_a_recipe(tmp_path: Path) -> None:
    first = write(tmp_path / "sums.jsonl", *[{"prompt": f"sum {n}", "extras": {"a": n}} for n in range(3)])
    second = write(tmp_path / "math.parquet", *[{"question": f"q{n}", "answer": n} for n in range(5)])
    columns = {"prompt": "question", "ground_truth": "answer"}
    parts = [{"source": first, "weight": 3}, {"source": second, "columns": columns, "split": "[:4]", "name": "hard"}]
    data = build(DataConfig, {"train": parts})
    found = load_tasks(data.train, "train", LoadContext(player=("environment", "e")))
    assert isinstance(found, Mixture)
    assert list(found.weights) == [3.0, 1.0]
    assert (
        [task.task_id for task in found]
        == list(task_ids(found))
        == [*(f"sums/sums-00000{n}" for n in (1, 2, 3)), *(f"hard/math-00000{n}" for n in range(4))]
    )
    assert dict(found[0].extras) == {"source": "sums", "a": 0}
    assert (dict(found[3].extras), found[3].ground_truth) == ({"source": "hard"}, 0)
    assert players(found) == {("environment", "e")}
    assert tasks_sha256(found) == tasks_sha256(
        load_tasks(data.train, "train", LoadContext(player=("environment", "e")))
    )


@settings(max_examples=30)
@given(
    sources=st.lists(st.tuples(st.integers(1, 12), st.floats(0.1, 10)), min_size=1, max_size=4),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_each_source_gets_its_share_of_any_first_groups_epoch_by_epoch(
    sources: list[tuple[int, float]], seed: int, shuffle: bool
) -> None:
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    mixed = mixture(sizes, weights)
    order = TaskOrder(mixed, seed, shuffle)
    counts = [0] * len(sources)
    visited: list[tuple[int, int]] = []
    seen: list[list[str]] = [[] for _ in sources]
    for index in range(80):
        epoch, position, task = order.at(index)
        assert task == mixed[position]
        visited.append((epoch, position))
        source = int(task.extras["source"][1:])
        assert epoch == counts[source] // sizes[source]
        counts[source] += 1
        seen[source].append(task.task_id)
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - weight / sum(weights) * (index + 1)) < max(1.5, len(sources) / 2)
    assert len(set(visited)) == 80  # draws are keyed by these
    for size, ids in zip(sizes, seen, strict=True):
        for start in range(0, len(ids) - size + 1, size):
            assert max(Counter(ids[start : start + size]).values()) == 1
    again = TaskOrder(mixture(sizes, weights), seed, shuffle)
    assert [again.at(index)[:2] for index in reversed(range(80))] == visited[::-1]


def test_every_task_comes_up_within_the_longest_wait() -> None:
    order = TaskOrder(mixture([3, 9, 1], [5.0, 1.0, 0.25]), seed=1, shuffle=True)
    assert {order.at(index)[1] for index in range(order.longest_wait)} == set(range(13))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": {}}, r"missing key 'train\.source'"),
        ({"train": []}, "train is an empty list; give at least one source"),
        ({"train": [{"weight": 1}]}, r"^missing key 'train\.0\.source'.*$"),
        ({"train": [{"source": "a.jsonl", "weight": 0}]}, r"train\.0\.weight: got 0"),
        (
            {"train": {"source": "a"}, "held_out": [{"source": "b.jsonl", "weight": 2}]},
            r"unknown key 'held_out\.0\.weight'",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        build(DataConfig, data)
    assert "Tuple" not in str(refused.value)  # pydantic's, of a list whose only source is wrong


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.jsonl", "b/a.jsonl"], r"data\.train: two sources are called 'a'; give each a name"),
        (["a.jsonl", "no.jsonl"], r"data\.train\[1\]\.source: cannot read .*no\.jsonl"),
    ],
)
def test_sources_of_one_name_and_one_that_is_not_there(tmp_path: Path, names: list[str], message: str) -> None:
    write(tmp_path / "a.jsonl", {"prompt": "x"})
    data = build(DataConfig, {"train": [{"source": str(tmp_path / name)} for name in names]})
    with pytest.raises(ConfigError, match=message):
        load_tasks(data.train, "train", LoadContext(player=("environment", "arithmetic")))


def test_sources_of_one_size_have_shuffles_of_their_own() -> None:
    order = TaskOrder(mixture([50, 50], [1, 1]), seed=0, shuffle=True)
    found = [order.at(index)[1] for index in range(100)]
    assert sorted(found) == list(range(100))
    assert [n for n in found if n < 50] != [n - 50 for n in found if n >= 50]
