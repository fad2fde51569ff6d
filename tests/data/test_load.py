"""Tasks of JSON lines and of generators."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from treadle.core.config import build
from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.data.config import SourceConfig
from treadle.data.load import LoadContext
from treadle.data.load import load_tasks as load

LOOKUP, ARITHMETIC = "treadle.envs.lookup", "treadle.envs.arithmetic"
HELLO = [{"role": "user", "content": "Hello"}]


def load_tasks(
    source: str, split: str, options: dict[str, Any], player: tuple[str, str] = ("environment", ""), /, **section: Any
) -> Sequence[Task]:
    found = build(SourceConfig, {"source": source, "options": options, **section})
    return load(found, split, LoadContext(player=player))


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


# ---- files


def test_a_file_gives_its_rows_in_order(tmp_path: Path) -> None:
    rows = [
        {"task_id": "a", "prompt": HELLO, "environment": "e", "ground_truth": [1, None], "extras": {"k": 1}},
        {"prompt": HELLO},
    ]
    source = write(tmp_path / "data.jsonl", rows[0], "", rows[1])
    assert load_tasks(source, "train", {}, ("environment", "fallback")) == [
        Task("a", ({"role": "user", "content": "Hello"},), "e", [1, None], {"k": 1}),
        Task("data-000003", ({"role": "user", "content": "Hello"},), "fallback"),
    ]


def test_odd_line_ends_inside_strings_and_byte_order_marks_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    row = json.dumps({"prompt": [{"role": "user", "content": "a\u2028b\x85ü"}]}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + row.encode() + b"\r\n" + row.encode())
    tasks = load_tasks(str(path), "train", {})
    assert [task.prompt[0]["content"] for task in tasks] == ["a\u2028b\x85ü"] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ('{"prompt": [], "extras": {"x": NaN}}', "'extras.x' is nan, which JSON cannot represent; write null"),
        ("[1]", "a row must be a JSON object, got list"),
        ({"promt": HELLO}, "unknown key 'promt'; keys are task_id, prompt"),
        ({"prompt": 3}, "prompt must be text or a JSON array of messages, got 3; write"),
        ({"prompt": ""}, "no prompt, and no environment; write"),
        ({"prompt": HELLO, "extras": [1]}, r"extras must be a JSON object, got \[1\]"),
        ({"prompt": HELLO, "task_id": 7}, "task_id must be a JSON string, got 7"),
        ({"prompt": HELLO, "task_id": ""}, "task_id must not be empty"),
        ({"prompt": HELLO, "environment": None}, "environment must be a JSON string, got None"),
        ({"prompt": [{"role": "user"}]}, "prompt: message 0 needs 'role' and 'content'"),
        ({"ground_truth": "7"}, "no prompt, and no environment; write"),
        ({"environment": f"{ARITHMETIC}:Arithmetic"}, "no prompt, and environment .* does not make its own"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    source = write(tmp_path / "data.jsonl", {"prompt": HELLO}, row)
    with pytest.raises(DataError, match=rf"data\.jsonl:2: {message}"):
        load_tasks(source, "train", {})


@pytest.mark.parametrize("environment", [{"environment": f"{LOOKUP}:Lookup"}, {}])
def test_an_environment_that_makes_its_prompt_needs_none(tmp_path: Path, environment: dict[str, str]) -> None:
    source = write(tmp_path / "data.jsonl", {"ground_truth": "x", **environment})
    (task,) = load_tasks(source, "train", {}, ("environment", f"{LOOKUP}:Lookup"))
    assert task.prompt == ()
    assert task.environment == f"{LOOKUP}:Lookup"


def test_files_that_cannot_be_read_and_ids_that_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    for missing in ("no.jsonl", "folder.jsonl"):
        with pytest.raises(ConfigError, match=f"cannot read .*{missing}: .*; check the path"):
            load_tasks(str(tmp_path / missing), "train", {})
    row = {"task_id": "same", "prompt": HELLO}
    source = write(tmp_path / "data.jsonl", row, {"prompt": HELLO}, row)
    with pytest.raises(DataError, match="task_id 'same' belongs to both task 0 and task 2"):
        load_tasks(source, "train", {})


# ---- generators


def test_a_generator_gets_split_and_options() -> None:
    tasks = load_tasks(f"{LOOKUP}:tasks", "held_out", {"count": 4, "hops": [2]})
    assert [task.task_id for task in tasks] == [f"lookup-held_out-00000{i}" for i in range(4)]
    assert {task.extras["hops"] for task in tasks} == {2}
    assert {task.environment for task in tasks} == {"lookup"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 4, "hopps": [2]}, "'hopps'; its options are count, seed, hops, page_reward, given: count, hopps"),
        ({}, "'count'; its options are count, seed, hops, page_reward, given: none"),
        ({"count": 1, "split": "train"}, "'split' is not an option, it is always 'held_out' here"),
    ],
)
def test_options_a_generator_does_not_take_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"treadle.envs.lookup:tasks.*{message}"):
        load_tasks(f"{LOOKUP}:tasks", "held_out", options)


def test_a_generator_must_be_a_function_that_returns_tasks(mine: ModuleType) -> None:
    mine.generate = lambda split: ["t"]  # type: ignore[attr-defined]
    mine.number = 3  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"must return Task objects or rows, got 't'"):
        load_tasks(f"{mine.__name__}:generate", "train", {})
    with pytest.raises(ConfigError, match="is of type int, it must be a function"):
        load_tasks(f"{mine.__name__}:number", "train", {})
    with pytest.raises(DataError, match=r"lookup:tasks has no tasks \(split 'train', options \{'count': 0\}\)"):
        load_tasks(f"{LOOKUP}:tasks", "train", {"count": 0})


# ---- columns and splits

QUESTIONS = [{"question": f"{n}?", "meta": {"answers": [n], "level": "hard"}, "id": n, "junk": [n]} for n in range(10)]
COLUMNS: dict[str, Any] = {
    "prompt": "question",
    "ground_truth": "meta.answers.0",
    "task_id": "id",
    "extras": {"level": "meta.level"},
}


def test_columns_and_nested_paths_of_json_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", *QUESTIONS)
    tasks = load_tasks(source, "train", {}, columns=COLUMNS)
    assert tasks[3] == Task("3", ({"role": "user", "content": "3?"},), "", 3, {"level": "hard"})
    [task] = load_tasks(source, "train", {}, columns={**COLUMNS, "extras": "meta"}, split="[90%:]")
    assert dict(task.extras) == QUESTIONS[9]["meta"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "qestion"}, "columns.prompt is 'qestion', but the row has no 'qestion', only question, meta, id"),
        ({"prompt": "question", "ground_truth": "meta.answer"}, "'meta' has no 'answer', only answers, level; correct"),
        (
            {"prompt": "question", "ground_truth": "meta.answers.7"},
            "'meta.answers' is a list of 1, and has no element '7'",
        ),
        ({"prompt": "question", "ground_truth": "id.x"}, "'id' is 0, which has no 'x'; correct the row or the path"),
        ({"prompt": "question", "extras": {"a": "b"}}, r"data\.columns\.extras\.a is 'b', but the row has no 'b'"),
        ({"prompt": "question", "task_id": "meta"}, "task_id must be a JSON string, got {"),
    ],
)
def test_a_path_that_is_not_there_is_named_with_its_row(tmp_path: Path, columns: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl:1: .*{message}") as caught:
        load_tasks(write(tmp_path / "data.jsonl", *QUESTIONS), "train", {}, columns=columns)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("split", "numbers"),
    [
        ("[:3]", [0, 1, 2]),
        ("[90%:]", [9]),
        ("all[-20%:]", [8, 9]),
        ("all", [*range(10)]),
        ("[25%:-7]", [2]),
        ("[:]", [*range(10)]),
    ],
)
def test_parts_of_a_file(tmp_path: Path, split: str, numbers: list[int]) -> None:
    source = write(tmp_path / "data.jsonl", *QUESTIONS)
    assert [task.ground_truth for task in load_tasks(source, "train", {}, columns=COLUMNS, split=split)] == numbers


def test_wrong_splits_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", *QUESTIONS)
    with pytest.raises(DataError, match=r"data\.jsonl has no tasks in '\[10:\]'"):
        load_tasks(source, "train", {}, columns=COLUMNS, split="[10:]")
    with pytest.raises(ConfigError, match=r"data\.held_out\.split: 'test\[' must look like train, test\[:500\]"):
        load_tasks(source, "held_out", {}, columns=COLUMNS, split="test[")
    with pytest.raises(ConfigError, match=r"the file .*data\.jsonl has no split 'test'; write all, or a part"):
        load_tasks(source, "train", {}, columns=COLUMNS, split="test")
    with pytest.raises(ConfigError, match=r"lookup:tasks' is a generator, without a split 'test'"):
        load_tasks(f"{LOOKUP}:tasks", "train", {"count": 3}, split="test")


def test_a_generator_may_yield_rows_and_is_given_the_seed(mine: ModuleType) -> None:
    def generate(split: str, seed: int) -> Any:
        yield Task("t")
        yield Task("u", environment="own")
        yield from QUESTIONS[seed : seed + 2]

    mine.generate = generate  # type: ignore[attr-defined]
    section = build(SourceConfig, {"source": f"{mine.__name__}:generate", "columns": {"prompt": "question"}})
    tasks = load(section, "train", LoadContext(player=("agent", "a"), seed=4))
    made = [("t", "a"), ("u", ""), ("generate-train-000002", "a"), ("generate-train-000003", "a")]
    assert [(t.task_id, t.agent) for t in tasks] == made
    assert tasks[2].prompt == ({"role": "user", "content": "4?"},)


def test_the_columns_of_all_sources_and_of_one(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", *QUESTIONS)
    everywhere = LoadContext(columns={"prompt": "meta.level"})
    assert load(build(SourceConfig, {"source": source}), "train", everywhere)[0].prompt[0]["content"] == "hard"
    own = build(SourceConfig, {"source": source, "columns": {"prompt": "question"}})
    assert load(own, "train", everywhere)[0].prompt[0]["content"] == "0?"
