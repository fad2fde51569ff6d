"""`notes`: its tasks, what an agent must do to solve them, and what the demonstrations show of it."""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence

import pytest

from treadle.core.errors import ConfigError, DataError
from treadle.core.types import Message, Task
from treadle.envs import lookup, notes
from treadle.envs.base import INTRODUCTION, EnvStep
from treadle.envs.notes import Notes, demonstration, tasks
from treadle.models.chat import load_chat
from treadle.orchestration.config import load_recipe
from treadle.training.demonstrations import demonstrated_calls

SEARCH = "<search>page</search>"
RECIPE = load_recipe("notes-small")


def play(task: Task, *replies: str) -> list[EnvStep]:
    async def episode() -> list[EnvStep]:
        environment = Notes()
        assert await environment.reset(task) == task.prompt
        return [await environment.step(text) for text in replies]

    return asyncio.run(episode())


def read(steps: Sequence[EnvStep]) -> list[str]:
    return [message["content"] for step in steps for message in step.observations]


def test_one_page_a_search_then_the_question_again_and_again_and_the_answer_is_on_the_page() -> None:
    for task in tasks("train", 30):
        number, asked = task.extras["pages"], task.extras["asked"]
        *searches, end = play(task, *[SEARCH] * (number + 2), f"<answer> {task.ground_truth}</answer>")
        texts = read(searches)
        assert texts[number:] == [f"What is the {task.extras['attribute']} of {asked}?"] * 2
        pages = {page.split(", ")[0].removeprefix("page "): page for page in texts[:number]}
        assert len(pages) == number and f"{task.extras['attribute']} {task.ground_truth}" in pages[asked].split(", ")
        assert not any(step.done or step.reward for step in searches)
        assert (end.reward, end.done, end.info["ended"]) == (1.0, True, "right")
        assert sum(step.info["pages_read"] for step in searches) == number
        assert task.extras["attribute"] in task.prompt[1]["content"] and asked not in task.prompt[1]["content"]


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
        end = play(task, *replies)[-1]
        assert (end.reward, end.done, end.info["ended"], end.info["invalid"]) == (0.0, True, how, how == "format")
    with pytest.raises(DataError, match="needs seed, persons, attribute, asked in extras"):
        play(Task("t", task.prompt, "notes", "1"))


def test_kinds_take_turns_and_no_held_out_pages_are_trained_on() -> None:
    held_out, train = tasks("held_out", 90), [task for seed in range(3) for task in tasks("train", 90, seed)]
    assert Counter(task.extras["pages"] for task in held_out) == {4: 30, 5: 30, 6: 30}
    assert {task.extras["pages"] for task in tasks("train", 9, pages=(2, 8))} == {2, 8}
    shown = [{tuple(read(play(task, SEARCH))) for task in split} for split in (held_out, train)]
    assert [len(pages) for pages in shown] == [90, 270] and not shown[0] & shown[1]
    for pages in ((), (1,), (9,), 4, ("4",)):
        with pytest.raises(ConfigError, match="pages must be a list out of 2 to 8; got"):
            tasks("train", 1, pages=pages)  # type: ignore[arg-type]


def parts(count: int, expert: float = 0.0) -> list[tuple[Message, ...]]:
    return [demonstration(index, 0, expert, drill=0.0) for index in range(count)]


def noted(text: str) -> dict[str, str]:
    """Read a summary, which must be well-formed."""
    assert re.fullmatch(r"page \w+ \w+(, \w+ \w+)*", text)
    facts = [fact.split(" ") for fact in text.removeprefix("page ").split(", ")]
    assert len({person for person, _ in facts}) == len(facts)
    return {person: value for person, value in facts}


def fields(page: str) -> tuple[str, dict[str, str]]:
    person, *rest = page.removeprefix("page ").split(", ")
    return person, dict(field.split(" ") for field in rest)


def test_demonstrated_summaries_copy_from_what_is_in_front_of_them_blind_to_the_task() -> None:
    assert RECIPE.rollout.compaction is not None and RECIPE.rollout.compaction.prompt == notes.PROMPT
    right: Counter[bool] = Counter()
    carried: Counter[bool] = Counter()
    for messages in parts(1500):
        assert messages[0]["content"] == lookup.SYSTEM
        asked = str(messages[1]["content"]).split()[1].removesuffix("?")
        facts = noted(messages[2]["content"].removeprefix(INTRODUCTION)) if messages[2]["role"] == "user" else {}
        pages = dict(fields(m["content"]) for m in messages if m["content"].startswith("page") and m["role"] == "tool")
        searches = [m["content"] for m in messages[2:-1] if m["role"] == "assistant"]
        assert set(searches) == {SEARCH} and len(searches) == sum(m["role"] == "tool" for m in messages)
        if not pages:
            about = re.fullmatch(r"What is the \w+ of (\w+)\?", messages[-2]["content"])
            assert about and messages[-1]["content"] == f"<answer> {facts[about[1]]}</answer>"
            continue
        assert messages[-2]["content"] == notes.PROMPT
        written = noted(messages[-1]["content"])
        for person, value in written.items():
            assert facts.get(person, value) == value if person in facts else value in pages[person].values()
        carried.update(person in written for person in facts)
        right.update(written[person] == pages[person][asked] for person in pages if person in written)
    assert right[True] / right.total() == pytest.approx(1 / 3, abs=0.05)
    assert carried[True] / carried.total() == pytest.approx(0.8, abs=0.05)


def test_expert_demonstrations_note_all_that_is_asked() -> None:
    for messages in parts(50, expert=1.0):
        if messages[-2]["content"] == notes.PROMPT:
            asked = str(messages[1]["content"]).split()[1].removesuffix("?")
            written = noted(messages[-1]["content"])
            for text in (m["content"] for m in messages if m["role"] == "tool"):
                person, page = fields(text)
                assert written[person] == page[asked]


def test_the_recipe_cannot_keep_all_pages_and_every_demonstration_fits() -> None:
    """In tokens, of the recipe's tokenizer and template."""
    renderer, rollout = load_chat(RECIPE.model)[1], RECIPE.rollout
    assert rollout.compaction is not None
    for index in range(200):
        for prompt, completion in demonstrated_calls(demonstration(index, 0, drill=0.0), renderer):
            assert len(prompt) <= rollout.max_input_tokens
            assert len(completion) <= rollout.compaction.max_tokens
    for task in tasks("held_out", 30):
        turns: list[Message] = []
        for text in read(play(task, *[SEARCH] * (task.extras["pages"] + 1))):
            turns += [Message(role="assistant", content=SEARCH), Message(role="tool", content=text)]
        last = Message(role="assistant", content=f"<answer> {task.ground_truth}</answer>")
        longest, _ = demonstrated_calls([*task.prompt, *turns, last], renderer)[-1]
        assert len(longest) > rollout.max_input_tokens > rollout.compaction_mark
