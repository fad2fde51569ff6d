"""`notes`: its tasks, what an agent must do to solve them, and what the demonstrations show of it."""

import re
from collections import Counter

import pytest

from tests.envs.kit import contents, play
from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Message, Task
from treadle.envs import lookup, notes
from treadle.envs.base import INTRODUCTION
from treadle.envs.notes import Notes, demonstration, tasks
from treadle.models.chat import load_chat
from treadle.plan.config import load_recipe
from treadle.training.demonstrations import demonstrated_calls

SEARCH = "<search>page</search>"
RECIPE = load_recipe("notes-small")


def facts(text: str) -> list[tuple[str, str]]:
    """Read a page or notes, which must be well-formed."""
    assert re.fullmatch(r"page \w+ \w+(, \w+ \w+)*", text)
    return [(name, value) for name, value in (fact.split(" ") for fact in text.removeprefix("page ").split(", "))]


def test_one_page_a_search_then_the_question_again_and_again_and_the_answer_is_on_a_page() -> None:
    for task in tasks("train", 30):
        number, asked = task.extras["pages"], task.extras["asked"]
        *searches, end = play(Notes(), task, *[SEARCH] * (number + 2), f"<answer> {task.ground_truth}</answer>")
        texts = contents(searches)
        assert texts[number:] == [f"What is the {asked}?"] * 2
        pages = [facts(page) for page in texts[:number]]
        names = [{name for name, _ in page} & {*notes.ASKED} for page in pages]
        assert all(len(page) == 7 for page in pages) and [len(name) for name in names] == [1] * number
        assert (
            len(set.union(*names)) == number and [(asked, task.ground_truth) in page for page in pages].count(True) == 1
        )
        assert not any(step.done or step.reward for step in searches)
        assert (end.reward, end.done, end.info["ended"]) == (1.0, True, "right")
        assert sum(step.info["pages_read"] for step in searches) == number


def test_what_earns_nothing() -> None:
    [task] = tasks("train", 1)
    answer = f"<answer> {task.ground_truth}</answer>"
    asked = [SEARCH] * (task.extras["pages"] + 1)
    ends = {
        "early": [*asked[1:], answer],
        "wrong": [*asked, "<answer> rice soup</answer>"],
        "format": [f"{SEARCH} and more"],
    }
    for how, replies in ends.items():
        end = play(Notes(), task, *replies)[-1]
        assert (end.reward, end.done, end.info["ended"], end.info["invalid"]) == (0.0, True, how, how == "format")
    with pytest.raises(DataError, match="needs seed, attributes, asked in extras"):
        play(Notes(), Task("t", task.prompt, "notes", "1"))


def test_kinds_take_turns_and_no_held_out_pages_are_trained_on() -> None:
    held_out, train = tasks("held_out", 90), [task for seed in range(3) for task in tasks("train", 90, seed)]
    assert Counter(task.extras["pages"] for task in held_out) == {4: 30, 5: 30, 6: 30}
    assert {task.extras["pages"] for task in tasks("train", 9, pages=(3, 6))} == {3, 6}
    shown = [{tuple(contents(play(Notes(), task, SEARCH))) for task in split} for split in (held_out, train)]
    assert [len(pages) for pages in shown] == [90, 270] and not shown[0] & shown[1]
    for pages in ((), (2,), (7,), 4, ("4",)):
        with pytest.raises(ConfigError, match="pages must be a list out of 3 to 6; got"):
            tasks("train", 1, pages=pages)  # type: ignore[arg-type]


def parts(count: int, expert: float = 0.0) -> list[tuple[Message, ...]]:
    return [demonstration(index, 0, expert, drill=0.0) for index in range(count)]


def test_demonstrated_summaries_copy_from_what_is_in_front_of_them_and_choose_at_random() -> None:
    assert RECIPE.rollout.compaction is not None and RECIPE.rollout.compaction.prompt == notes.PROMPT
    useful: Counter[bool] = Counter()
    carried: Counter[bool] = Counter()
    for messages in parts(1500):
        assert messages[0]["content"] == lookup.SYSTEM
        noted = facts(messages[2]["content"].removeprefix(INTRODUCTION)) if messages[2]["role"] == "user" else []
        shown = [message["content"] for message in messages if message["role"] == "tool"]
        assert [m["content"] for m in messages[2:-1] if m["role"] == "assistant"] == [SEARCH] * len(shown)
        if messages[-2]["role"] == "tool":
            about = re.fullmatch(r"What is the (\w+)\?", messages[-2]["content"])
            assert about and messages[-1]["content"] in [
                f"<answer> {value}</answer>" for n, value in noted if n == about[1]
            ]
            continue
        assert messages[-2]["content"] == notes.PROMPT
        written, pages = facts(messages[-1]["content"]), [facts(text) for text in shown]
        assert written and set(written) <= set(noted).union(*pages)
        carried.update(fact in written for fact in noted)
        useful.update(name in notes.ASKED for name, _ in set(written) - set(noted))
    assert useful[True] / useful.total() == pytest.approx(1 / 4, abs=0.05)
    assert carried[True] / carried.total() == pytest.approx(0.8, abs=0.05)


def test_expert_demonstrations_note_all_that_may_be_asked() -> None:
    for messages in parts(50, expert=1.0):
        if messages[-2]["content"] == notes.PROMPT:
            pages = [fact for m in messages if m["role"] == "tool" for fact in facts(m["content"])]
            assert {fact for fact in pages if fact[0] in notes.ASKED} <= set(facts(messages[-1]["content"]))


def test_the_recipe_cannot_keep_all_pages_and_every_demonstration_fits() -> None:
    """In tokens, of the recipe's tokenizer and template."""
    renderer, rollout = load_chat(RECIPE.model, None)[1], RECIPE.rollout
    assert rollout.compaction is not None
    for index in range(200):
        for prompt, completion, *_ in demonstrated_calls(demonstration(index, 0, drill=0.0), renderer):
            assert len(prompt) <= rollout.max_input_tokens
            assert len(completion) <= rollout.compaction.max_tokens
    for task in tasks("held_out", 30):
        turns: list[Message] = []
        for text in contents(play(Notes(), task, *[SEARCH] * (task.extras["pages"] + 1))):
            turns += [Message(role="assistant", content=SEARCH), Message(role="tool", content=text)]
        last = Message(role="assistant", content=f"<answer> {task.ground_truth}</answer>")
        longest, *_ = demonstrated_calls([*task.prompt, *turns, last], renderer)[-1]
        assert len(longest) > rollout.max_input_tokens > rollout.compaction_mark
