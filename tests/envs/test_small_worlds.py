"""Generated worlds: what all of them promise of their tasks, and the two that need no file of their own."""

import importlib
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.kit import play
from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.envs import arithmetic, phone_book
from treadle.envs.base import EnvStep

SPLITS = ("train", "held_out")


@pytest.fixture(params=["arithmetic", "lookup", "notes", "phone_book", "search.small", "sql.small"])
def world(request: pytest.FixtureRequest) -> Any:
    for library in {"search.small": ("bm25s", "httpx"), "sql.small": ("pandas",)}.get(request.param, ()):
        pytest.importorskip(library)
    return importlib.import_module(f"treadle.envs.{request.param}")


def test_more_tasks_only_append_and_held_out_ones_ignore_the_seed(world: Any) -> None:
    tasks = world.tasks
    assert tasks("held_out", 9, seed=1) == tasks("held_out", 12, seed=2)[:9]
    assert tasks("train", 9, seed=1) == tasks("train", 12, seed=1)[:9] != tasks("train", 9, seed=2)
    assert len({task.task_id for split in SPLITS for task in tasks(split, 60)}) == 120


def test_impossible_tasks_and_demonstrations_are_refused(world: Any) -> None:
    for split in ("test", "", "heldout", "Train"):
        with pytest.raises(DataError, match=f"no split '{split}'; write 'train' or 'held_out'"):
            world.tasks(split, 1)
    for count in (-1, 2.0, "8", True):
        with pytest.raises(ConfigError, match=f"count must be a whole number >= 0, got {count!r}"):
            world.tasks("train", count)
    for name in ("expert", "drill"):
        for value in (-0.1, 1.5, float("nan"), "0.4"):
            if hasattr(world, "demonstration") and (world, name) != (arithmetic, "drill"):
                with pytest.raises(ConfigError, match=f"{name} is a share and must lie between 0 and 1, got"):
                    world.demonstration(0, 0, **{name: value})


# ---- arithmetic


def grade(task: Task, text: str) -> EnvStep:
    [step] = play(arithmetic.Arithmetic(), task, text)
    return step


def pair(task: Task) -> tuple[int, int]:
    return task.extras["a"], task.extras["b"]


def test_a_task_asks_for_the_sum_of_its_digits_and_the_exact_sum_is_right() -> None:
    for task in arithmetic.tasks("train", 80) + arithmetic.tasks("held_out", 20):
        a, b = pair(task)
        assert task.prompt == ({"role": "user", "content": f"What is {a} + {b}?"},)
        assert (task.ground_truth, task.environment) == (str(a + b), "arithmetic")
    total = sum(pair(task))
    assert grade(task, f"<answer> {total}</answer>") == EnvStep((), 1.0, True, {"ended": "right"})
    assert grade(task, f"<answer>{total}</answer>").reward == 1.0
    for wrong in (f"<answer> {total + 1}</answer>", f"<answer> 0{total}</answer>", "<answer></answer>"):
        assert grade(task, wrong) == EnvStep((), 0.0, True, {"ended": "wrong"})
    for malformed in ("", str(total), f"<answer> {total}", f"<answer> {total}</answer>.", f"<search> {total}</search>"):
        assert grade(task, malformed) == EnvStep((), 0.0, True, {"ended": "format"})


def test_pairs_come_round_equally_often_in_another_order_and_the_splits_are_complete() -> None:
    for split in SPLITS:
        size = len(arithmetic.PAIRS[split])
        made = arithmetic.tasks(split, 3 * size)
        passes = [list(map(pair, made[i * size : (i + 1) * size])) for i in range(3)]
        assert passes[0] != passes[1]
        assert sorted(passes[0]) == sorted(passes[1]) == list(arithmetic.PAIRS[split])
    train, held_out = (arithmetic.PAIRS[split] for split in SPLITS)
    assert sorted([*train, *held_out]) == [(a, b) for a in range(10) for b in range(10)]
    assert {a + b for a, b in train} == set(range(19))  # no answer is unheard of in training


@pytest.mark.parametrize("expert", [0.0, 0.3, 1.0])
def test_the_share_of_right_demonstrations(expert: float) -> None:
    right = 0
    for index in range(2000):
        question, reply = (str(message["content"]) for message in arithmetic.demonstration(index, 0, expert))
        asked = re.fullmatch(r"What is (\d) \+ (\d)\?", question)
        said = re.fullmatch(r"<answer> (\d+)</answer>", reply)
        assert asked and said and 0 <= int(said[1]) <= 18
        a, b = int(asked[1]), int(asked[2])
        assert (a, b) in arithmetic.PAIRS["train"]
        right += int(said[1]) == a + b
    assert right / 2000 == pytest.approx(expert + (1 - expert) / 19, abs=0.035)


# ---- phone_book


@pytest.mark.parametrize("split", SPLITS)
def test_the_way_of_each_question_ends_with_its_answer(split: str) -> None:
    for task in phone_book.tasks(split, 60):
        name, hops = task.extras["name"], task.extras["hops"]
        calls = [f"PHONE {name}"]
        if hops == 2:
            calls = [f"FRIEND {name}", f"PHONE {task.extras['people'][name]['friend']}"]
        *steps, end = play(phone_book.PhoneBook(), task, *calls, f"ANSWER {task.ground_truth}")
        assert [(step.reward, step.done) for step in steps] == [(0.0, False)] * hops
        assert (end.reward, end.done, end.info["ended"]) == (1.0, True, "right")
        assert steps[-1].observations[0]["content"] == task.ground_truth
        question = str(task.prompt[-1]["content"])
        assert name in question and ("friend" in question) == (hops == 2)


def test_both_kinds_take_turns_and_no_name_is_in_two_places() -> None:
    for split in SPLITS:
        made = phone_book.tasks(split, 200)
        assert Counter(task.extras["hops"] for task in made) == {1: 100, 2: 100}
        assert {name for task in made for name in task.extras["people"]} == set(phone_book.NAMES[split])
    examples = " ".join(str(message["content"]) for message in phone_book.tasks("train", 1)[0].prompt[:-1])
    train, held_out = (set(phone_book.NAMES[split]) for split in SPLITS)
    assert not train & held_out and not (train | held_out) & set(re.findall(r"\w+", examples))


def test_what_is_no_call_ends_it_and_unknown_names_do_not() -> None:
    task = phone_book.tasks("train", 1)[0]
    unknown, wrong = play(phone_book.PhoneBook(), task, "PHONE Nobody.", f"ANSWER 0{task.ground_truth}")
    assert not unknown.done and unknown.observations[0]["content"] == "There is no Nobody."
    assert (wrong.reward, wrong.info["ended"]) == (0.0, "wrong")
    with pytest.raises(DataError, match="people"):
        play(phone_book.PhoneBook(), Task("t", task.prompt, "phone_book", "1"))


@given(st.text())
def test_any_text_is_a_move_or_ends_the_episode(text: str) -> None:
    [step] = play(phone_book.PhoneBook(), phone_book.tasks("train", 1)[0], text)
    assert step.done == (step.info["tool_calls"] == 0)
    assert step.info["invalid"] == (step.info.get("ended") == "format")
    step = grade(arithmetic.tasks("train", 1)[0], text)
    assert step.done and step.reward == float(step.info["ended"] == "right")
