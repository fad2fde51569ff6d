"""`search-small`: its corpus, its questions, and what an agent must do to answer them."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("bm25s")
pytest.importorskip("httpx")

from treadle.core.errors import ConfigError
from treadle.core.rewards import Reward
from treadle.core.types import Message, Status, Task
from treadle.envs.lookup import CITIES, HOBBIES, PRODUCTS
from treadle.envs.search.small import SearchSmall, demonstration, find, passages, questions, tasks, world
from treadle.envs.tasks import SPLITS

HELD_OUT = tasks("held_out", 1024)


def play(task: Task, agent: Callable[[Task, Sequence[str]], str]) -> float:
    """The reward of an agent that is given the task and what it has read so far."""

    async def episode() -> float:
        environment, read = SearchSmall(), list[str]()
        await environment.reset(task)
        while not (step := await environment.step(agent(task, read))).done:
            read += [message["content"] for message in step.observations]
        return Reward.of((await environment.finish(Status.DONE)).reward).total()

    return asyncio.run(episode())


def mean(agent: Callable[[Task, Sequence[str]], str], hops: int) -> float:
    rewards = [play(task, agent) for task in HELD_OUT if task.extras["hops"] == hops]
    return sum(rewards) / len(rewards)


def solving(task: Task, read: Sequence[str]) -> str:
    names = task.extras["names"]
    return (
        f"<search> {names[len(read)]}</search>" if len(read) < len(names) else f"<answer> {task.ground_truth}</answer>"
    )


def form(text: str) -> str:
    """A question without names: `Where does work?`."""
    words = text.removesuffix("?").split()
    return " ".join(word for place, word in enumerate(words) if not word[0].isupper() or not place)


FACTS = {"What does like": "likes", "Where does work": "works at", "What does make": "makes", "Where is": "is in"} | {
    "What does the company of make": "makes",
    "Where is the company of": "is in",
}
COMMONEST = {
    kind: Counter(q.answer for hops in (1, 2) for q in questions("train", hops) if form(q.text) == kind).most_common(1)
    for kind in FACTS
}


def searching(times: int) -> Callable[[Task, Sequence[str]], str]:
    """An agent that understands everything, but searches only so often; else it guesses the commonest answer."""

    def agent(task: Task, read: Sequence[str]) -> str:
        names, asked = task.extras["names"], form(str(task.prompt[-1]["content"]))
        if len(read) < min(times, len(names)):
            return f"<search> {names[len(read)]}</search>"
        [(guess, _)] = COMMONEST[asked]
        for passage in read:
            _, found, rest = passage.partition(f" {FACTS[asked]} ")
            guess = rest.split(" and ")[0].split(".")[0] if found else guess
        return f"<answer> {guess}</answer>"

    return agent


def test_both_kinds_of_questions_are_answered_by_their_searches() -> None:
    assert mean(solving, 1) == mean(solving, 2) == 1.0
    assert mean(searching(1), 1) == mean(searching(2), 2) == 1.0


def test_without_a_search_an_agent_scores_chance() -> None:
    for hops in (1, 2):
        kinds = Counter(form(str(task.prompt[-1]["content"])) for task in HELD_OUT if task.extras["hops"] == hops)
        values = {"likes": len(HOBBIES), "works at": 120, "makes": len(PRODUCTS), "is in": len(CITIES)}
        chance = sum(count / values[FACTS[kind]] for kind, count in kinds.items()) / kinds.total()
        assert 0.05 < chance < 0.08
        assert abs(mean(searching(0), hops) - chance) < 0.03


def test_two_hops_need_two_searches() -> None:
    assert mean(searching(1), 2) == mean(searching(0), 2)
    for task in HELD_OUT:
        if task.extras["hops"] == 2:
            person, company = task.extras["names"]
            shown = find(str(task.prompt[-1]["content"]), 3) + find(person, 3)
            assert not any(passage.startswith(company) for passage in shown)


def test_the_first_passage_found_is_the_one_about_whom_it_is_searched_for() -> None:
    for split in SPLITS:
        own = world(split)
        for name in (*own.people, *own.companies):
            assert find(name, 1) == [own.passage(name)]


def test_nobody_is_in_both_splits_and_every_word_is() -> None:
    train, held_out = (world(split) for split in SPLITS)
    for names, others in ((train.people, held_out.people), (train.companies, held_out.companies)):
        assert not set(names) & set(others)
        assert {word for name in names for word in name.split()} == {word for name in others for word in name.split()}
    assert {facts["works at"] for facts in held_out.people.values()} <= set(held_out.companies)
    assert {facts["works at"] for facts in train.people.values()} <= set(train.companies)
    assert len(passages()) == len(set(passages())) == 1264
    asked = {name for number in (1, 2) for question in questions("train", number) for name in question.names}
    assert not asked & {name for task in HELD_OUT for name in task.extras["names"]}


def test_tasks_take_turns() -> None:
    assert Counter(task.extras["hops"] for task in HELD_OUT) == {1: 512, 2: 512}
    assert len({str(task.prompt) for task in HELD_OUT}) == len({task.task_id for task in HELD_OUT}) == 1024
    assert {task.extras["hops"] for task in tasks("train", 4, hops=[2])} == {2}
    assert len({str(task.prompt) for task in tasks("train", 1440)}) == 1440
    with pytest.raises(ConfigError, match="hops must be a list out of 1, 2; got"):
        tasks("train", 1, hops=[3])


def shown(messages: Iterable[Message]) -> list[list[str]]:
    """The passages of each observation."""
    observed = [str(m["content"]) for m in messages if "<information>" in str(m["content"])]
    return [re.findall(r"Doc \d+: (.*?)\\n", text) for text in observed]


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 3))
def test_demonstrations_show_what_the_environment_would(index: int, seed: int, topk: int) -> None:
    """Each observation is what the environment makes of a search, whose best passage is about whom it names."""
    messages = demonstration(index, seed, topk=topk)
    assert messages == demonstration(index, seed, topk=topk)
    replies = [str(message["content"]) for message in messages if message["role"] == "assistant"]
    found = iter(shown(messages))
    if messages[0]["role"] == "user":
        assert len(replies) == 3 and all(reply.startswith(" ") for reply in replies)
        return

    class Imagined(SearchSmall):
        async def retrieve(self, query: str, topk: int) -> Sequence[str]:
            own = next(found)
            assert len(own) == topk and own[0].startswith(query)
            return own

    async def episode() -> None:
        environment = Imagined(topk=topk)
        await environment.reset(Task("demonstration", messages[:2], "search_small", "?"))
        for place, reply in enumerate(replies):
            step = await environment.step(reply)
            assert step.done == (place == len(replies) - 1)
            assert tuple(step.observations) == messages[3 + 2 * place : 4 + 2 * place]

    asyncio.run(episode())


def test_demonstrations_tell_nothing_of_the_corpus() -> None:
    """Else what is held out would be known, or what is trained learned by heart instead of read."""
    told = [passage for index in range(2000) for own in shown(demonstration(index, 0)) for passage in own]
    assert len(told) > 3000
    assert sum(passage in passages() for passage in told) < 0.01 * len(told)
