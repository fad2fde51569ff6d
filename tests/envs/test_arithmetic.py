import asyncio
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.envs.arithmetic import PAIRS, Arithmetic, demonstration, tasks
from treadle.envs.base import EnvStep


def grade(task: Task, text: str) -> EnvStep:
    async def episode() -> EnvStep:
        environment = Arithmetic()
        assert await environment.reset(task) == task.prompt
        step = await environment.step(text)
        await environment.close()
        return step

    return asyncio.run(episode())


def pair(task: Task) -> tuple[int, int]:
    return task.extras["a"], task.extras["b"]


def test_a_task_asks_for_the_sum_of_its_digits() -> None:
    for task in tasks("train", 80) + tasks("held_out", 20):
        a, b = pair(task)
        assert task.prompt == ({"role": "user", "content": f"What is {a} + {b}?"},)
        assert task.ground_truth == str(a + b)
        assert task.environment == "arithmetic"


def test_the_exact_sum_is_right() -> None:
    task = tasks("train", 1)[0]
    total = sum(pair(task))
    assert grade(task, f"<answer> {total}</answer>") == EnvStep((), 1.0, True, {"ended": "right"})
    assert grade(task, f"<answer>{total}</answer>").reward == 1.0
    for wrong in (f"<answer> {total + 1}</answer>", f"<answer> 0{total}</answer>", "<answer></answer>"):
        assert grade(task, wrong) == EnvStep((), 0.0, True, {"ended": "wrong"})
    for malformed in ("", str(total), f"<answer> {total}", f"<answer> {total}</answer>.", f"<search> {total}</search>"):
        assert grade(task, malformed) == EnvStep((), 0.0, True, {"ended": "format"})


@given(st.text())
def test_any_text_ends_the_episode(text: str) -> None:
    step = grade(tasks("train", 1)[0], text)
    assert step.done
    assert step.reward == float(step.info["ended"] == "right")


def test_the_splits_are_disjoint_and_complete() -> None:
    assert len(PAIRS["train"]) == 80
    assert len(PAIRS["held_out"]) == 20
    assert set(PAIRS["train"]) | set(PAIRS["held_out"]) == {(a, b) for a in range(10) for b in range(10)}
    assert {a + b for a, b in PAIRS["train"]} == set(range(19))  # no answer is unheard of in training


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_pairs_come_round_equally_often_under_distinct_ids(split: str) -> None:
    size = len(PAIRS[split])
    made = tasks(split, 3 * size)
    assert Counter(map(pair, made)) == dict.fromkeys(PAIRS[split], 3)
    assert len({task.task_id for task in made}) == 3 * size
    passes = [list(map(pair, made[i * size : (i + 1) * size])) for i in range(3)]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1]) == list(PAIRS[split])


def test_seeds_order_training_but_not_held_out_tasks() -> None:
    assert tasks("held_out", 30, seed=0) == tasks("held_out", 30, seed=1)
    assert list(map(pair, tasks("train", 30, seed=0))) != list(map(pair, tasks("train", 30, seed=1)))
    assert tasks("train", 100, seed=1)[:30] == tasks("train", 30, seed=1)


def test_another_split_or_count_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'test'"):
        tasks("test", 1)
    with pytest.raises(ConfigError, match="count must be a whole number >= 0, got -1"):
        tasks("train", -1)


def solved(index: int, seed: int, expert: float) -> bool:
    question, reply = (message["content"] for message in demonstration(index, seed, expert))
    asked, said = (re.fullmatch(r"What is (\d) \+ (\d)\?", question), re.fullmatch(r"<answer> (\d+)</answer>", reply))
    assert asked and said
    a, b = int(asked[1]), int(asked[2])
    assert (a, b) in PAIRS["train"]
    assert 0 <= int(said[1]) <= 18
    return int(said[1]) == a + b


@pytest.mark.parametrize("expert", [0.0, 0.3, 1.0])
def test_the_share_of_right_demonstrations(expert: float) -> None:
    share = sum(solved(i, 0, expert) for i in range(2000)) / 2000
    assert share == pytest.approx(expert + (1 - expert) / 19, abs=0.035)


@pytest.mark.parametrize("expert", [-0.1, 1.1])
def test_shares_outside_0_to_1_are_refused(expert: float) -> None:
    with pytest.raises(ConfigError, match="expert is a share and must lie between 0 and 1"):
        demonstration(0, 0, expert)
