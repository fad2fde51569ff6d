"""What cannot be stored and read again is refused in every source of tasks, by file, row and column."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treadle.api.public import _source_or_tasks, _tasks
from treadle.core.errors import DataError
from treadle.core.text import DEEPEST, json_problem, read_json
from treadle.core.types import Task
from treadle.data.config import SourceConfig
from treadle.data.load import LoadContext, load_tasks
from treadle.data.published import sql_questions
from treadle.plan.player import Player
from treadle.record.trajectory_files import read_files
from treadle.rollout.config import RolloutConfig
from treadle.training.demonstrations import load_demonstrations

COLUMNS: dict[str, Any] = {"prompt": "q", "ground_truth": "a.value", "extras": {"level": "meta.level"}}
CONTEXT = LoadContext(columns=COLUMNS)  # type: ignore[arg-type]
CONFIG: Any = SimpleNamespace(
    data=SimpleNamespace(columns=COLUMNS), player=Player("environment", ""), rollout=RolloutConfig()
)
MESSAGES = [{"role": "user", "content": "Hi"}]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def row(**changed: Any) -> dict[str, Any]:
    return {"q": "2 + 2?", "a": {"value": "4"}, "meta": {"level": 1}} | changed


def from_jsonl(path: Path, bad: dict[str, Any]) -> Any:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (row(), bad)).replace("Infinity", "1e400"))
    return load_tasks(SourceConfig(source=str(file)), "train", CONTEXT)


def from_parquet(path: Path, bad: dict[str, Any]) -> Any:
    file = path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([bad]), file)
    return load_tasks(SourceConfig(source=str(file)), "train", CONTEXT)


def from_data_set(path: Path, bad: dict[str, Any]) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([bad]).save_to_disk(path / "saved")
    return load_tasks(SourceConfig(source=str(path / "saved")), "train", CONTEXT)


def from_generator(path: Path, bad: dict[str, Any]) -> Any:
    sys.modules["gate_module"].generate = lambda split: iter([row(), bad])  # type: ignore[attr-defined]
    return load_tasks(SourceConfig(source="gate_module:generate"), "train", CONTEXT)


def from_python(path: Path, bad: dict[str, Any]) -> Any:
    return _tasks(_source_or_tasks([row(), bad], "tasks"), "train", CONFIG, {})


def from_frame(path: Path, bad: dict[str, Any]) -> Any:
    return _tasks(_source_or_tasks(pa.Table.from_pylist([bad]), "tasks"), "train", CONFIG, {})


SOURCES: list[tuple[Callable[[Path, dict[str, Any]], Any], str]] = [
    (from_jsonl, r"rows\.jsonl:2: "),
    (from_parquet, r"rows\.parquet: row 0 \(counted from 0\): "),
    (from_data_set, r"saved: row 0 \(counted from 0\): "),
    (from_generator, r"gate_module:generate': row 1 \(counted from 0\): "),
    (from_python, r"tasks\[1\]: "),
    (from_frame, r"tasks\[0\]: "),
]


@pytest.fixture(autouse=True)
def user_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gate_module", ModuleType("gate_module"))


def sources(*without: Callable[..., Any]) -> pytest.MarkDecorator:
    chosen = [source for source in SOURCES if source[0] not in without]
    return pytest.mark.parametrize(("load", "where"), chosen, ids=lambda value: getattr(value, "__name__", ""))


@sources()
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none(tmp_path: Path, load: Any, where: str, number: float) -> None:
    with pytest.raises(DataError, match=f"{where}.*a.value.* is {number}, which JSON cannot represent; write null"):
        load(tmp_path, row(a={"value": number}))
    with pytest.raises(DataError, match=rf"{where}.*meta.level.1.* is {number}, which JSON can"):
        load(tmp_path, row(meta={"level": [1.5, number]}))


@sources(from_parquet, from_data_set, from_frame)  # Arrow refuses them itself
def test_half_characters(tmp_path: Path, load: Any, where: str) -> None:
    for bad, column in ((row(a={"value": "x\ud800"}), "a.value"), (row(q="\udfff"), "q")):
        with pytest.raises(DataError, match=rf"{where}.*{column}.* half a character"):
            load(tmp_path, bad)
    with pytest.raises(DataError, match=rf"{where}.*key .*half a character"):
        load(tmp_path, row(meta={"level": {"\ud800": 1}}))


@sources(from_parquet, from_data_set, from_frame)
def test_deep_values(tmp_path: Path, load: Any, where: str) -> None:
    with pytest.raises(DataError, match=rf"{where}.*nested deeper than {DEEPEST} levels"):
        load(tmp_path, row(meta={"level": nested(DEEPEST + 6)}))


@pytest.mark.parametrize("levels", [900, 100_000])
@pytest.mark.parametrize("load", [from_jsonl, from_python])
def test_depths_that_stop_the_parser(tmp_path: Path, load: Any, levels: int) -> None:
    if load is from_jsonl:
        (tmp_path / "deep.jsonl").write_text('{"q": ' + "[" * levels + "]" * levels + "}\n")
        with pytest.raises(DataError, match=r"deep\.jsonl:1: .*nested (too deep|deeper)"):
            load_tasks(SourceConfig(source=str(tmp_path / "deep.jsonl")), "train", CONTEXT)
    else:
        with pytest.raises(DataError, match=r"tasks\[1\]: .*nested deeper"):
            load(tmp_path, row(meta={"level": nested(levels)}))


@sources()
@pytest.mark.parametrize(
    "text", [json.dumps(MESSAGES), " " + json.dumps(MESSAGES, indent=1), str(MESSAGES), json.dumps(MESSAGES[0])]
)
def test_messages_stored_as_text(tmp_path: Path, load: Any, where: str, text: str) -> None:
    with pytest.raises(DataError, match=rf"{where}column 'q' has messages as text.*store .* as a list"):
        load(tmp_path, row(q=text))


@sources()
def test_other_texts_that_look_like_json_are_prompts(tmp_path: Path, load: Any, where: str) -> None:
    for text in ('[{"name": "x"}]', "[1, 2] sorted?", '{"role": "user"} is what?', "[{'role': 3", "[]"):
        assert load(tmp_path, row(q=text))[-1].prompt[0]["content"] == text


@sources(from_jsonl, from_parquet, from_data_set, from_frame)
def test_values_of_python_alone(tmp_path: Path, load: Any, where: str) -> None:
    for value, problem in (
        ({1, 2}, "is of type set, which is not plain JSON data"),
        ({1: 2}, "key 1, which is not text"),
    ):
        with pytest.raises(DataError, match=f"{where}.*meta.level.* {problem}"):
            load(tmp_path, row(meta={"level": value}))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "\ud800", nested(70), {3: 4}, b"x"])
def test_a_task_of_ones_own_is_checked_where_it_is_made(bad: Any) -> None:
    for parts in ({"ground_truth": bad}, {"extras": {"a": [bad]}}):
        with pytest.raises(DataError, match=f"task t: '{next(iter(parts))}"):
            Task("t", MESSAGES, **parts)  # type: ignore[arg-type]
    for broken in ({"task_id": "\ud800"}, {"environment": "\ud800"}, {"prompt": [{**MESSAGES[0], "name": "\ud800"}]}):
        with pytest.raises(DataError, match="half a character"):
            Task(**{"task_id": "t"} | broken)
    with pytest.raises(DataError, match="task_id"):
        Task(7)  # type: ignore[arg-type]


BAD_TEXTS = ['{"x": 1e400}', '{"x": NaN}', '{"x": "\\ud800"}', '{"x": ' + "[" * 900 + "]" * 900 + "}"]


@pytest.mark.parametrize("text", BAD_TEXTS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_files_of_trajectories(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(f'{{"messages": [], "components": {text}}}\n')
    with pytest.raises(DataError, match=name):
        list(read_files(tmp_path / name))


def test_trajectories_in_parquet(tmp_path: Path) -> None:
    chat = [*MESSAGES, {"role": "assistant", "content": "Ho"}]
    for wrong, message in (
        ({"components": {"right": float("nan")}}, r"'components\.right' is nan"),
        ({"messages": json.dumps(chat)}, "'messages' must be a list of objects, got .* not JSON text"),
    ):
        pq.write_table(pa.Table.from_pylist([{"messages": chat} | wrong]), tmp_path / "rows.parquet")
        with pytest.raises(DataError, match=rf"rows\.parquet:1: .*{message}"):
            list(read_files(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_files_of_demonstrations(tmp_path: Path, text: str) -> None:
    chat = json.dumps([*MESSAGES, {"role": "assistant", "content": "Ho"}])
    (tmp_path / "d.jsonl").write_text(f'{{"messages": {chat}}}\n{{"messages": {chat}, "tools": [{text}]}}\n')
    with pytest.raises(DataError, match=r"d\.jsonl:2: .*tools"):
        load_demonstrations(str(tmp_path / "d.jsonl"), {}, 0)


def test_demonstrations_of_a_generator_and_messages_as_text(tmp_path: Path) -> None:
    chat = [*MESSAGES, {"role": "assistant", "content": "Ho\ud800"}]
    sys.modules["gate_module"].demonstrate = lambda index, seed: chat  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"gate_module:demonstrate, demonstration 0: message 1.* half a character"):
        load_demonstrations("gate_module:demonstrate", {}, 0)(0)
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": json.dumps(chat)}) + "\n")
    with pytest.raises(DataError, match=r"d\.jsonl:1: .*'messages' list, got .* not JSON text"):
        load_demonstrations(str(tmp_path / "d.jsonl"), {}, 0)


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_published_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "spider.json").write_text(f"[{text}]")
    with pytest.raises(DataError, match=r"spider\.json"):
        list(sql_questions("train", str(tmp_path / "spider.json"), str(tmp_path)))


def test_the_place_of_a_problem() -> None:
    assert json_problem({"a": [1, {"b": 2.5}], "c": None, "ü": "ü", "d": (1, True, "x"), "e": [1.5, 2]}) is None
    assert json_problem(nested(DEEPEST)) is None
    problem = json_problem({"a": [1, {"b": [1, float("inf")]}]})
    assert problem is not None and problem.path == "a.1.b.1"
    for text in ('{"a": 1e400}', '{"a": -1e400}', '{"a": NaN}'):
        with pytest.raises(ValueError, match=r"'a' is -?(inf|nan), which JSON cannot represent"):
            read_json(text)
