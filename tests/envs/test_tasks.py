import asyncio
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.envs.arithmetic import Arithmetic
from treadle.envs.base import Environment, EnvStep
from treadle.envs.lookup import Lookup
from treadle.envs.tasks import load_environment, load_tasks

LOOKUP, ARITHMETIC = "treadle.envs.lookup", "treadle.envs.arithmetic"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module to put a user's own things into."""
    module = ModuleType("treadle_test_user_module")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


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
        ('{"prompt": [], "extras": {"x": NaN}}', "not JSON: NaN is not a JSON number"),
        ("[1]", "a row must be a JSON object, got list"),
        ({"promt": HELLO}, "unknown key 'promt'; keys are task_id, prompt"),
        ({"prompt": "Hello"}, "prompt must be a JSON array, got 'Hello'"),
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


def test_bytes_that_are_no_utf8_are_named_too(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": []}\n{"ground_truth": "\xff"}\n')
    with pytest.raises(DataError, match=r"data\.jsonl:2: not JSON: 'utf-8' codec"):
        load_tasks(str(path), "train", {})


@pytest.mark.parametrize("environment", [{"environment": f"{LOOKUP}:Lookup"}, {}])
def test_an_environment_that_makes_its_prompt_needs_none(tmp_path: Path, environment: dict[str, str]) -> None:
    source = write(tmp_path / "data.jsonl", {"ground_truth": "x", **environment})
    (task,) = load_tasks(source, "train", {}, ("environment", f"{LOOKUP}:Lookup"))
    assert task.prompt == ()
    assert task.environment == f"{LOOKUP}:Lookup"


@pytest.mark.parametrize("missing", ["no.jsonl", "folder.jsonl"])
def test_a_file_that_cannot_be_read_is_a_matter_of_configuration(tmp_path: Path, missing: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=f"cannot read .*{missing}: .*; check the path"):
        load_tasks(str(tmp_path / missing), "train", {})


def test_a_file_takes_no_options(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", {"prompt": HELLO})
    with pytest.raises(ConfigError, match="takes no options, got count; remove them"):
        load_tasks(source, "train", {"count": 3})


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl has no tasks"):
        load_tasks(write(tmp_path / "data.jsonl", "", " "), "train", {})


def test_task_ids_must_differ(tmp_path: Path) -> None:
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


def test_the_default_environment_is_for_tasks_that_name_none(mine: ModuleType) -> None:
    def generate(split: str) -> Sequence[Task]:
        return (Task(f"{split}-1"), Task(f"{split}-2", environment="own"))

    mine.generate = generate  # type: ignore[attr-defined]
    tasks = load_tasks(f"{mine.__name__}:generate", "train", {}, ("environment", "fallback"))
    assert tasks == [Task("train-1", environment="fallback"), Task("train-2", environment="own")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 4, "hopps": [2]}, "'hopps'; its options are count, seed, hops, page_reward, given: count, hopps"),
        ({}, "'count'; its options are count, seed, hops, page_reward, given: none"),
        ({"count": 1, "split": "train"}, "'split' is no option, it is always 'held_out' here"),
    ],
)
def test_options_a_generator_does_not_take_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"treadle.envs.lookup:tasks.*{message}"):
        load_tasks(f"{LOOKUP}:tasks", "held_out", options)


def test_a_type_error_inside_a_generator_is_not_hidden(mine: ModuleType) -> None:
    def generate(split: str) -> list[Task]:
        raise TypeError("a bug of its own")

    mine.generate = generate  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="a bug of its own"):
        load_tasks(f"{mine.__name__}:generate", "train", {})


def test_a_generator_without_tasks_is_refused() -> None:
    with pytest.raises(DataError, match=r"lookup:tasks has no tasks \(split 'train', options \{'count': 0\}\)"):
        load_tasks(f"{LOOKUP}:tasks", "train", {"count": 0})


def test_a_generator_that_repeats_itself_is_refused(mine: ModuleType) -> None:
    mine.generate = lambda split: [Task("t"), Task("t")]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="task_id 't' belongs to both task 0 and task 1"):
        load_tasks(f"{mine.__name__}:generate", "train", {})


def test_a_generator_must_be_a_function_that_returns_tasks(mine: ModuleType) -> None:
    mine.generate = lambda split: [{"task_id": "t"}]  # type: ignore[attr-defined]
    mine.number = 3  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"must return Task objects, got \{'task_id': 't'\}"):
        load_tasks(f"{mine.__name__}:generate", "train", {})
    with pytest.raises(ConfigError, match="is of type int, it must be a function"):
        load_tasks(f"{mine.__name__}:number", "train", {})


# ---- environments


def test_an_environment_is_loaded_as_its_class() -> None:
    assert load_environment(f"{ARITHMETIC}:Arithmetic") is Arithmetic
    assert isinstance(load_environment(f"{LOOKUP}:Lookup")(), Lookup)


def test_an_environment_need_not_inherit_from_ours(mine: ModuleType) -> None:
    class Own:
        task: Task

        async def reset(self, task: Task) -> Sequence[Any]:
            return task.prompt

        async def step(self, text: str) -> EnvStep:
            return EnvStep(reward=float(len(text)), done=True)

        async def close(self) -> None: ...

    mine.Own = Own  # type: ignore[attr-defined]
    environment = load_environment(f"{mine.__name__}:Own")()
    assert asyncio.run(environment.step("abc")).reward == 3.0


def sync_step(self: Any, text: str) -> EnvStep:
    return EnvStep(done=True)


async def async_step(self: Any, text: str) -> EnvStep:
    return EnvStep(done=True)


@pytest.mark.parametrize(
    ("bases", "body", "message"),
    [
        ((Environment,), {}, r"step is missing; write 'def step\(self, text\)', async or not"),
        ((), {"step": async_step}, r"reset is missing; write 'def reset\(self, task\)', async or not"),
        (
            (Environment,),
            {"step": async_step, "close": 3},
            r"close is missing; write 'def close\(self\)', async or not",
        ),
        (
            (Environment,),
            {"step": async_step, "__init__": lambda self, url: None},
            "made without arguments, .*'url'; give it a default",
        ),
    ],
)
def test_an_environment_that_cannot_run_is_refused_at_once(
    mine: ModuleType, bases: tuple[type, ...], body: dict[str, Any], message: str
) -> None:
    mine.Mine = type("Mine", bases, body)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"{mine.__name__}:Mine.*{message}"):
        load_environment(f"{mine.__name__}:Mine")


@pytest.mark.parametrize(
    "body", [{"step": sync_step}, {"step": async_step, "close": lambda self: None, "reset": lambda self, task: ()}]
)
def test_methods_may_be_plain(mine: ModuleType, body: dict[str, Any]) -> None:
    mine.Mine = type("Mine", (Environment,), body)  # type: ignore[attr-defined]
    assert load_environment(f"{mine.__name__}:Mine") is mine.Mine


def test_an_environment_must_be_a_class(mine: ModuleType) -> None:
    mine.make = lambda: Arithmetic()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="is of type function, it must be a class"):
        load_environment(f"{mine.__name__}:make")


def test_the_shipped_environments_write_only_what_they_must() -> None:
    assert Arithmetic.reset is Environment.reset
    assert inspect.iscoroutinefunction(Lookup.reset)
