import asyncio
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.envs.base import EnvStep
from treadle.envs.phone_book import NAMES, PhoneBook, tasks


def play(task: Task, *replies: str) -> list[EnvStep]:
    async def episode() -> list[EnvStep]:
        environment = PhoneBook()
        assert await environment.reset(task) == task.prompt
        return [await environment.step(text) for text in replies]

    return asyncio.run(episode())


def path(task: Task) -> list[str]:
    """The replies of an agent that does it right."""
    name = task.extras["name"]
    calls = [f"PHONE {name}"]
    if task.extras["hops"] == 2:
        calls = [f"FRIEND {name}", f"PHONE {task.extras['people'][name]['friend']}"]
    return [*calls, f"ANSWER {task.ground_truth}"]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_the_way_of_each_question_ends_with_its_answer(split: str) -> None:
    for task in tasks(split, 60):
        *calls, end = play(task, *path(task))
        assert [(step.reward, step.done) for step in calls] == [(0.0, False)] * task.extras["hops"]
        assert (end.reward, end.done, end.info["ended"]) == (1.0, True, "right")
        found = calls[-1].observations[0]["content"]
        assert found == task.ground_truth  # what the last call shows
        question = task.prompt[-1]["content"]
        assert isinstance(question, str) and task.extras["name"] in question
        assert ("friend" in question) == (task.extras["hops"] == 2)


def test_both_kinds_take_turns_and_no_name_is_in_two_places() -> None:
    for split in NAMES:
        found = tasks(split, 200)
        assert Counter(task.extras["hops"] for task in found) == {1: 100, 2: 100}
        assert {name for task in found for name in task.extras["people"]} == set(NAMES[split])
        assert len({task.task_id for task in found}) == 200
    examples = " ".join(str(message["content"]) for message in tasks("train", 1)[0].prompt[:-1])
    assert not set(NAMES["train"]) & set(NAMES["held_out"])
    assert not {*NAMES["train"], *NAMES["held_out"]} & set(re.findall(r"\w+", examples))


def test_training_tasks_follow_the_seed_and_held_out_ones_do_not() -> None:
    assert tasks("train", 5) == tasks("train", 9)[:5] != tasks("train", 5, seed=1)
    assert tasks("held_out", 5) == tasks("held_out", 5, seed=1)
    with pytest.raises(DataError, match="test"):
        tasks("test", 1)
    with pytest.raises(ConfigError, match="count"):
        tasks("train", -1)


def test_what_is_no_call_ends_it_and_unknown_names_do_not() -> None:
    task = tasks("train", 1)[0]
    [unknown] = play(task, "PHONE Nobody.")
    assert not unknown.done and unknown.observations[0]["content"] == "There is no Nobody."
    [wrong] = play(task, f"ANSWER 0{task.ground_truth}")
    assert (wrong.reward, wrong.info["ended"]) == (0.0, "wrong")
    with pytest.raises(DataError, match="people"):
        play(Task("t", task.prompt, "phone_book", "1"))


@given(st.text())
def test_any_text_is_a_call_or_ends_the_episode(text: str) -> None:
    [step] = play(tasks("train", 1)[0], text)
    assert step.done == (step.info["tool_calls"] == 0)
    assert step.info["invalid"] == (step.info.get("ended") == "format")
