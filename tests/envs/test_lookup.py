import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treadle.core.errors import ConfigError, DataError
from treadle.core.rewards import Reward
from treadle.core.types import Message, Task, as_messages
from treadle.envs import lookup
from treadle.envs.base import EnvStep
from treadle.envs.lookup import Lookup, World, demonstration, tasks

Policy = Callable[[Sequence[Message]], str]


def play(task: Task, policy: Policy) -> tuple[list[Message], list[EnvStep]]:
    """The conversation and the environment's answers of one episode."""

    async def episode() -> tuple[list[Message], list[EnvStep]]:
        environment = Lookup()
        messages = [*await environment.reset(task)]
        steps: list[EnvStep] = []
        while not steps or not steps[-1].done:
            reply = policy(messages)
            steps.append(await environment.step(reply))
            messages += [Message(role="assistant", content=reply), *as_messages(steps[-1].observations, "step")]
        await environment.close()
        return messages, steps

    return asyncio.run(episode())


def oracle(messages: Sequence[Message]) -> str:
    """Answers from what it reads alone: it knows the wording, not the world."""
    question = messages[1]["content"]
    wanted = {
        r"What is the hobby of (\w+)\?": ["hobby"],
        r"What product does the company of (\w+) make\?": ["company", "product"],
        r"In what city is the company of (\w+)\?": ["company", "city"],
        r"In what country does (\w+) work\?": ["company", "city", "country"],
        r"What food is famous in the city where (\w+) works\?": ["company", "city", "food"],
    }
    (start, fields) = next((m[1], f) for p, f in wanted.items() if (m := re.fullmatch(p, question)))
    pages = [message["content"] for message in messages if message["role"] == "tool"]
    if not pages:
        return f"<search> {start}</search>"
    found = re.search(rf"\b{fields[len(pages) - 1]} (\w+)", pages[-1])
    assert found
    return f"<answer> {found[1]}</answer>" if len(pages) == len(fields) else f"<search> {found[1]}</search>"


def contents(messages: Sequence[Message], role: str) -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


# ---- tasks


HELD_OUT = tasks("held_out", 300)


def all_pages(world_seed: str) -> tuple[str, ...]:
    world = World(world_seed)
    return tuple(world.search(name) for name in lookup.FIELDS)


@given(seed=st.integers(), index=st.integers(0, 299))
def test_no_held_out_world_is_ever_trained_on(seed: int, index: int) -> None:
    trained = tasks("train", index + 1, seed=seed)[index]
    assert trained.extras["world_seed"] not in {task.extras["world_seed"] for task in HELD_OUT}
    assert trained.task_id not in {task.task_id for task in HELD_OUT}
    same_question = [task for task in HELD_OUT if task.prompt == trained.prompt]
    worlds = {all_pages(task.extras["world_seed"]) for task in same_question[:3]}
    assert all_pages(trained.extras["world_seed"]) not in worlds


@pytest.mark.parametrize("hops", [(), (4,), (0, 1), 2, "12", [[1]]])
def test_impossible_hops_are_refused(hops: Sequence[int]) -> None:
    with pytest.raises(ConfigError, match="hops must be a list out of 1, 2, 3; got"):
        tasks("train", 1, hops=hops)
    with pytest.raises(ConfigError, match="hops must be a list out of 1, 2, 3; got"):
        demonstration(0, 0, hops=hops)


# ---- worlds


@given(seed=st.text(), names=st.permutations(list(lookup.FIELDS)))
def test_a_world_does_not_depend_on_what_was_looked_up_first(seed: str, names: list[str]) -> None:
    one, other = World(seed), World(seed)
    for name in names:
        one.search(name)
    for name in lookup.FIELDS:
        assert one.search(name) == other.search(name)
        assert set(one.page(name)) == set(lookup.FIELDS[name])
        assert all(value in lookup.VALUES[field] for field, value in one.page(name).items())


def test_pages_read_as_documented_and_unknown_names_find_nothing() -> None:
    world = World("w")
    assert re.fullmatch(r"page Acme(, (city|product|boss) \w+){3}", world.search("Acme"))
    for unknown in ("acme", "chess", "", "Anna Bob", " Anna"):
        assert world.search(unknown) == "nothing found"


# ---- episodes


def found(text: str) -> EnvStep:
    """The answer to a search."""
    info = {"searches": 1, "found_nothing": text == "nothing found", "invalid": False}
    return EnvStep([{"role": "tool", "content": text}], info=info)


def ended(how: str) -> EnvStep:
    """The end of an episode."""
    info = {"ended": how, "searches": 0, "invalid": how == "format"}
    return EnvStep(reward=float(how == "right"), done=True, info=info)


@given(seed=st.integers(), index=st.integers(0, 8), split=st.sampled_from(["train", "held_out"]))
def test_an_oracle_that_only_reads_is_right_in_hops_searches(seed: int, index: int, split: str) -> None:
    task = tasks(split, index + 1, seed=seed)[index]
    messages, steps = play(task, oracle)
    assert [step.reward for step in steps] == [0.0] * task.extras["hops"] + [1.0]
    assert steps[-1] == ended("right")
    assert sum(step.info["searches"] for step in steps) == task.extras["hops"]
    assert len(steps) <= lookup.MAX_TURNS == 6
    assert contents(messages, "assistant")[-1] == f"<answer> {task.ground_truth}</answer>"


@given(seed=st.integers(), index=st.integers(0, 8))
def test_pages_on_the_way_pay_once_by_name(seed: int, index: int) -> None:
    task = tasks("train", index + 1, seed=seed, page_reward=0.25)[index]
    plain = tasks("train", index + 1, seed=seed)[index]
    assert replace(task, extras=plain.extras) == plain  # the same questions
    pages, answer = lookup.question_of(task).solve(World(task.extras["world_seed"]))
    searches = [f"<search> {name}</search>" for name in ("Nobody", pages[0], *pages)]
    replies = iter([*searches, f"<answer> {answer}</answer>"])
    messages, steps = play(task, lambda _: next(replies))
    given = [Reward.of(step.reward).components for step in steps]
    paying = {1, *range(3, 2 + len(pages))}  # the first page is opened twice
    assert given[:-1] == [{"page": 0.25} if n in paying else {} for n in range(len(steps) - 1)]
    assert given[-1] == {"answer": 1.0}
    assert messages == play(plain, again(messages))[0]


def again(messages: Sequence[Message]) -> Callable[[Sequence[Message]], str]:
    replies = iter(contents(messages, "assistant"))
    return lambda _: next(replies)


def test_a_page_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="page_reward must be a finite number, got 'x'"):
        tasks("train", 1, page_reward="x")  # type: ignore[arg-type]
    task = tasks("train", 1)[0]
    with pytest.raises(DataError, match="page_reward must be a number, got 'x'"):
        play(replace(task, extras={**task.extras, "page_reward": "x"}), oracle)


@pytest.mark.parametrize(("turn", "how"), [(5, "right"), (6, "right"), (7, "turns")])
def test_an_answer_counts_up_to_the_sixth_turn(turn: int, how: str) -> None:
    task = tasks("train", 1)[0]
    replies = iter(["<search> Anna</search>"] * (turn - 1) + [f"<answer> {task.ground_truth}</answer>"])
    _, steps = play(task, lambda _: next(replies))
    assert len(steps) == min(turn, 6)
    assert steps[-1] == ended(how)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{gold}",
        " {gold}",
        "<answer> {gold}",
        "<answer> {gold}</search>",
        "<search> Anna</answer>",
        "<answer> {gold}</answer> ",
        "so <answer> {gold}</answer>",
        "<answer> {gold}</answer><answer> {gold}</answer>",
        "<search> Anna</search><answer> {gold}</answer>",
        "<answer> < {gold}</answer>",
        "<answer> {gold}</answer><|im_end|>",
        "<Answer> {gold}</Answer>",
    ],
)
def test_a_malformed_action_ends_the_episode_without_reward(text: str) -> None:
    task = tasks("train", 1)[0]
    _, steps = play(task, lambda _: text.format(gold=task.ground_truth))
    assert steps == [ended("format")]


@given(st.text() | st.from_regex(r"<(search|answer)>[\s\S]*</(search|answer)>", fullmatch=True))
@example("<search>\x00\ud800</search>")
def test_random_text_never_raises_and_never_wins(text: str) -> None:
    task = replace(tasks("train", 1)[0], ground_truth="a value that is never guessed")
    _, steps = play(task, lambda _: text)
    assert steps[-1].reward == 0.0
    assert steps[-1].info["ended"] in ("wrong", "turns", "format")
    assert len(steps) in (1, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extras": {}}, "needs the strings world_seed, start, attribute in extras"),
        ({"extras": {"world_seed": 0, "start": "Anna", "attribute": "hobby"}}, "needs the strings world_seed in"),
        ({"extras": {"world_seed": "0", "start": "Acme", "attribute": "hobby"}}, "'hobby' of 'Acme'"),
        ({"extras": {"world_seed": "0", "start": "Anna", "attribute": "boss"}}, "must be one of hobby, product"),
        ({"ground_truth": None}, "needs its answer as a string in ground_truth, got None"),
    ],
)
def test_a_task_that_describes_no_question_is_refused(change: dict[str, object], message: str) -> None:
    task = replace(tasks("train", 1)[0], **change)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"lookup-train-0-000000 .*{message}"):
        play(task, oracle)


# ---- demonstrations


@given(
    index=st.integers(0, 10**6),
    seed=st.integers(),
    expert=st.floats(0, 1),
    drill=st.floats(0, 1),
    hops=st.lists(st.sampled_from([1, 2, 3]), min_size=1),
)
def test_a_demonstration_ends_with_an_answer(
    index: int, seed: int, expert: float, drill: float, hops: list[int]
) -> None:
    messages = demonstration(index, seed, expert, drill, hops)
    roles = [message["role"] for message in messages]
    if messages[0]["role"] == "user":  # a drill
        assert roles == ["user", "assistant"] * 3
        assert all(re.fullmatch(r" \w+", answer) for answer in contents(messages, "assistant"))
    else:
        searches = roles.count("tool")
        assert 1 <= searches <= 3
        assert roles == ["system", "user", *["assistant", "tool"] * searches, "assistant"]
        assert re.fullmatch(r"<answer> \w+</answer>", messages[-1]["content"])


def test_demonstrations_are_what_the_environment_would_have_said() -> None:
    for index in range(200):
        messages = demonstration(index, 5, drill=0.0)
        question, world_seed = messages[1]["content"], f"demonstration/5/{index}"
        start = next(word for word in re.findall(r"\w+", question) if word in lookup.PERSONS)
        attribute = next(a for a, text in lookup.QUESTIONS.items() if text.format(start) == question)
        _, gold = lookup.Question(world_seed, start, attribute).solve(World(world_seed))
        extras = {"world_seed": world_seed, "start": start, "attribute": attribute}
        task = Task("replay", ground_truth=gold, extras=extras)
        assert play(task, again(messages))[0] == list(messages)


def test_worlds_are_frozen() -> None:
    """A changed draw would silently make another benchmark of the same name, also in a process of another hash seed."""
    text = "\n".join(f"{t.task_id} {t.prompt} {t.ground_truth} {all_pages(t.extras['world_seed'])}" for t in HELD_OUT)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "64ca9bf94191f885"
