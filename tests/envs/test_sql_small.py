"""The generated databases of `sql-small`: what is asked has one answer, and held-out pairs of tables stay unseen."""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.kit import contents, play
from treadle.core.types import Message, Task
from treadle.envs.sql import small
from treadle.envs.sql.environment import TextToSql
from treadle.envs.sql.small import ALL_PAIRS, GROUPS, PAIRS, PLACES, TABLES, VALUES, demonstration, draw_question, tasks

INDICES = st.integers(0, 10**6)


def attempt(task: Task, replies: list[str]) -> tuple[list[str], float]:
    """What the agent reads, and the reward of the last reply."""
    steps = play(TextToSql(max_turns=small.MAX_TURNS), task, *replies)
    assert steps[-1].done and isinstance(steps[-1].reward, float)
    return contents(steps), steps[-1].reward


def tables_of(messages: Sequence[Message]) -> frozenset[str]:
    schema = next(message["content"] for message in messages if message["content"].startswith("Columns: "))
    return frozenset(pair.split()[1] for pair in schema.splitlines()[0].removeprefix("Columns: ")[:-1].split(", "))


def said(messages: Sequence[Message], role: str) -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


def test_the_pairs_of_tables_are_split() -> None:
    train, held_out = map(set, (PAIRS["train"], PAIRS["held_out"]))
    assert not train & held_out and train | held_out == set(product(PLACES, GROUPS))
    assert {table for pair in train for table in pair} == set(TABLES)  # every word is trained


@pytest.mark.parametrize("split", PAIRS)
def test_tasks_are_of_their_splits_pairs(split: str) -> None:
    pairs = {tables_of(task.prompt) for task in tasks(split, 600)}
    assert pairs == set(map(frozenset, PAIRS[split]))


def test_demonstrations_show_all_pairs() -> None:
    pairs = {tables_of(demonstration(index, seed)) for index in range(600) for seed in range(2)}
    assert pairs == set(map(frozenset, product(PLACES, GROUPS)))


@given(INDICES, st.sampled_from([1, 2]), st.sampled_from(["train", "held_out"]))
@settings(deadline=None, max_examples=40)
def test_the_expert_reads_what_the_demonstration_shows_and_is_right(index: int, hops: int, split: str) -> None:
    """Also: the answer is one row, and another column of the same row is wrong."""
    question = draw_question(f"{split}/{index}", PAIRS[split], hops)
    task = Task("t", question.prompt(), "text_to_sql", question.gold(), {"script": question.world.script()})
    shown = small._attempt(question, question.column, through_link=hops == 2)
    observed, reward = attempt(task, said(shown, "assistant"))
    assert reward == 1 and len(observed) == hops - 1
    assert observed == said(shown, "user")[1:]
    table = question.world.table_of(question.column)
    other = next(c for c in VALUES if c != question.column and c in question.world.columns[table])
    assert attempt(task, said(small._attempt(question, other, through_link=hops == 2), "assistant"))[1] == 0


def test_two_hops_need_the_second_table() -> None:
    """No query on the table that the question names gives the answer: its column is not there."""
    for task in tasks("held_out", 40)[1::2]:
        content = task.prompt[1]["content"]
        column, first = content.splitlines()[1].split()[3], content.split()[-1].rstrip("?")
        reply = f"<think></think><solution>select {column} from {first}</solution>"
        assert attempt(task, [reply])[1] == 0


def test_a_demonstration_is_mostly_blind_and_well_formed() -> None:
    """The share of right attempts is what expert and chance make it; none breaks the format."""
    rewards: Counter[float] = Counter()
    for index in range(400):
        messages = demonstration(index, seed=5, drill=0.0)
        question = draw_question(f"demonstration/5/{index}", ALL_PAIRS, 1 + ("<sql>" in messages[2]["content"]))
        if messages[:2] != question.prompt():  # it took the way of the other number of hops
            question = draw_question(f"demonstration/5/{index}", ALL_PAIRS, 3 - question.hops)
        assert messages[:2] == question.prompt()
        task = Task("t", messages[:2], "", question.gold(), {"script": question.world.script()})
        observed, reward = attempt(task, said(messages, "assistant"))
        assert observed == said(messages, "user")[1:]
        rewards[reward] += 1
    assert set(rewards) == {0.0, 1.0}
    assert 0.22 < rewards[1.0] / 400 < 0.40  # .2 + .8 / 6 * .75 = .3, and a few by chance
