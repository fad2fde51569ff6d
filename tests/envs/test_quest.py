"""`quest`: its tasks, what solves them, and what its demonstrations know."""

from collections import Counter

import pytest

from tests.envs.kit import play
from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Task
from treadle.envs.quest import KINDS, RULE, UNKNOWN, Quest, demonstration, right_thing, rooms_of, solved, tasks
from treadle.models.chat import load_chat
from treadle.plan.config import load_recipe
from treadle.training.demonstrations import demonstrated_calls

RECIPE = load_recipe("quest-small")
KIND = {thing: kind for kind, things in KINDS.items() for thing in things}


def replies(task: Task) -> list[str]:
    return [message["content"] for message in solved(task) if message["role"] == "assistant"]


def test_only_the_right_thing_in_every_room_is_rewarded_and_only_at_the_end() -> None:
    for task in tasks("train", 30):
        right = replies(task)
        *steps, end = play(Quest(), task, *right)
        assert len(right) == task.extras["rooms"] >= 18
        assert not any(step.done or step.reward for step in steps)
        assert (end.reward, end.done) == (1.0, True)
        for wrong in (0, len(right) - 1):
            changed = [*right[:wrong], " paper", *right[wrong + 1 :]]
            *steps, end = play(Quest(), task, *changed)
            assert (end.reward, end.done) == (0.0, True)
            assert sum(step.info["rooms_right"] for step in [*steps, end]) == len(right) - 1
    with pytest.raises(DataError, match="needs seed and rooms in extras"):
        play(Quest(), Task("t", environment="quest"), "a")


def test_a_quest_goes_through_all_cities_and_each_room_has_one_thing_of_each_kind() -> None:
    assert Counter(RULE.values()) == dict.fromkeys(KINDS, len(RULE) // len(KINDS))
    for seed in range(50):
        rooms = rooms_of(str(seed), 14)
        assert {city for city, _ in rooms} == set(RULE) and len(rooms) == 14
        for room in rooms:
            assert sorted(map(KIND.__getitem__, room[1])) == sorted(KINDS)
            assert KIND[right_thing(room)] == RULE[room[0]]


def test_tasks_differ_and_held_out_ones_ignore_the_seed() -> None:
    assert tasks("held_out", 9, seed=3) == tasks("held_out", 9)
    made = [rooms_of(t.extras["seed"], t.extras["rooms"]) for t in (*tasks("train", 90), *tasks("held_out", 90))]
    assert len({str(rooms) for rooms in made}) == 180
    assert Counter(task.extras["rooms"] for task in tasks("train", 90)) == {18: 30, 19: 30, 20: 30}
    for rooms in ((), (11,), (25,), 12):
        with pytest.raises(ConfigError, match="rooms must be a list out of 12 to 24"):
            tasks("train", 1, rooms=rooms)  # type: ignore[arg-type]


@pytest.mark.parametrize("expert", [0.0, 0.2, 1.0])
def test_demonstrations_take_the_right_thing_where_they_know_it(expert: float) -> None:
    right: dict[bool, list[bool]] = {True: [], False: []}
    for index in range(400):
        shown = demonstration(index, 0, expert)[2:]
        for room, reply in zip(shown[::2], shown[1::2], strict=True):
            _, city, *things = room["content"].split()
            right[city in UNKNOWN].append(reply["content"] == f" {right_thing((city, tuple(things)))}")
    assert all(right[False])
    assert sum(right[True]) / len(right[True]) == pytest.approx(expert + (1 - expert) / 3, abs=0.03)
    with pytest.raises(ConfigError, match="expert is a share"):
        demonstration(0, 0, 2.0)


def test_the_recipe_reads_each_word_as_one_token() -> None:
    renderer = load_chat(RECIPE.model, None)[1]
    for task in tasks("train", 6):
        calls = demonstrated_calls(solved(task), renderer)
        assert {len(completion) for _, completion, *_ in calls} == {2}
        assert max(len(prompt) for prompt, *_ in calls) <= RECIPE.rollout.max_input_tokens
