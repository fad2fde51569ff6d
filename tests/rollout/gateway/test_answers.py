"""Which answers an agent used: the rule alone, and through the gateway with unmodified clients."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.gateway.servers import Slow, scripted
from tests.worlds import addresses, plain_renderer, tool, user
from treadle.core.outcomes import as_played, as_trained
from treadle.core.types import DropReason, Message, Task, ToolCall, Trajectory
from treadle.rollout.agents.clients import anthropic_client
from treadle.rollout.attempt import Players, open_rollouts
from treadle.rollout.config import RolloutConfig
from treadle.rollout.gateway.answers import Answers

ASK, TASK = Message(role="system", content="You play chess."), user("Who plays chess?")


def said(text: str, *calls: ToolCall, thought: str = "") -> Message:
    message = Message(role="assistant", content=text)
    if calls:
        message["tool_calls"] = list(calls)
    if thought:
        message["reasoning_content"] = thought
    return message


def look(ident: str, arguments: str = '{"who": "Anna"}') -> ToolCall:
    return ToolCall(id=ident, type="function", function={"name": "look", "arguments": arguments})


class Attempt:
    """The calls of one attempt; numbers are those of arrival."""

    def __init__(self) -> None:
        self.answers, self.count = Answers(), 0

    def ask(self, prompt: list[Message] | str) -> tuple[int, int]:
        self.count += 1
        if isinstance(prompt, str):
            return self.answers.ask_raw(prompt), self.count - 1
        return self.answers.ask(prompt), self.count - 1

    def call(self, prompt: list[Message] | str, reply: Message | str) -> None:
        self.answers.answer(*self.ask(prompt), said(reply) if isinstance(reply, str) else reply)

    def together(self, prompt: list[Message] | str, *replies: Message | str) -> None:
        for asked, reply in [(self.ask(prompt), reply) for reply in replies]:
            self.answers.answer(*asked, said(reply) if isinstance(reply, str) else reply)

    @property
    def unused(self) -> list[int]:
        return self.answers.unused(range(self.count))


TEXTS = st.text("ab\n ", max_size=6)
"""Short ones that repeat each other, empty ones, and ones of white space."""


@st.composite
def turns(draw: st.DrawFn) -> tuple[Message, Message, Message]:
    """A reply, how the agent sends it back, and what comes after it."""
    ident, who = f"c{draw(st.integers(0, 3))}", draw(TEXTS)
    looks, spaced = draw(st.booleans()), draw(st.booleans())
    calls = [look(ident, json.dumps({"who": who}))] if looks else []
    reply = said(draw(TEXTS), *calls, thought=draw(TEXTS))
    kept = {key: item for key, item in reply.items() if key != "reasoning_content" or draw(st.booleans())}
    back = Message(**kept)  # type: ignore[typeddict-item]
    if draw(st.booleans()):
        back["content"] = back["content"].strip()
    if calls and spaced:
        back["tool_calls"] = [look(ident, json.dumps({"who": who}, indent=1))]
    return reply, back, draw(st.sampled_from([user, tool]))(draw(TEXTS))


@given(st.lists(turns(), min_size=1, max_size=6))
def test_a_conversation_that_goes_on_throws_nothing_away(conversation: list[tuple[Message, Message, Message]]) -> None:
    attempt, history = Attempt(), [ASK, TASK]
    for reply, back, after in conversation:
        attempt.call(history, reply)
        history = [*history, back, after]
    assert attempt.unused == []


@given(st.lists(st.tuples(turns(), st.sampled_from(["", "again", "left out"])), min_size=1, max_size=6))
def test_an_answer_that_no_later_prompt_has_is_thrown_away(conversation: list[tuple[Any, str]]) -> None:
    """Each turn may be sampled twice, of which the second goes on: for the same prompt, or for one with a note."""
    attempt, history, thrown = Attempt(), [ASK, TASK], []
    for (reply, back, after), draft in conversation:
        if draft:
            thrown.append(attempt.count)
            attempt.call(history, f"draft {attempt.count}")
        if draft == "left out":
            history = [*history, user("Once more.")]
        attempt.call(history, reply)
        history = [*history, back, after]
    attempt.call(history, "the end")
    assert attempt.unused == thrown


BEGUN = [TASK, said("Hm."), user("Well?")]


def of_two(reply: Message | str, later: list[Message], first: Message | str = "no good") -> list[int]:
    """Which is thrown away of two answers to a prompt, when this one comes later."""
    attempt = Attempt()
    attempt.call([TASK], "Hm.")
    attempt.call(BEGUN, first)
    attempt.call(BEGUN, reply)
    attempt.call(later, "the end")
    return attempt.unused


LONG = "Anna plays chess on Mondays, Bob on Tuesdays."


@pytest.mark.parametrize(
    ("reply", "later"),
    [
        ("I look.", [*BEGUN, said("I look."), user("!")]),
        ("I look.", [user("more"), said("I look."), user("!")]),  # earlier messages were dropped
        ("<think>x</think> I look.", [*BEGUN, said("I look."), user("!")]),  # the agent strips thoughts
        ("I look.\nObservation: Bob?", [*BEGUN, said("I look."), user("Anna.")]),  # or cuts what it made up
        ("I look.", [*BEGUN, said("I look.\nObservation: Anna.")]),  # or writes into the turn, which is continued
        ("I\n look.", [user("So far: I look. And now?")]),
        (said("", look("c1")), [*BEGUN, said("", look("c1", "{}")), tool("x")]),
        (said("", look("c1")), [user("more"), said("I do.", look("other", '{"who":"Anna"}')), tool("x")]),
        (said("", thought="Anna, surely"), [user("Notes: Anna, surely")]),
        (f"<analysis>so</analysis>\n<summary>\n{LONG}\n</summary>", [user(f"Summary:\n{LONG}\nGo on.")]),
        (f"Here:\n```python\n{LONG}\n```\nDone.", [user(f"Your code:\n{LONG}\nfails.")]),
        ("I look.", [ASK | {"content": "Your notes: I look."}, TASK]),
    ],
)
def test_how_a_prompt_repeats_an_answer(reply: Message | str, later: list[Message]) -> None:
    assert of_two(reply, later) == [1]


def test_what_was_in_its_own_prompt_repeats_no_answer() -> None:
    assert of_two("fine", [*BEGUN, said("fine"), user("?")], first="Hm.") == [1]


def test_in_doubt_an_answer_was_used() -> None:
    """Changed beyond recognition; left for another prompt; the last; equal to the other; equal to a later one."""
    assert of_two("I look.", [*BEGUN, said('{"action": "look"}'), user("!")]) == []
    assert of_two("I look.", [user("A title?")]) == []
    assert of_two("I look.", BEGUN) == []
    assert of_two(said("", look("c1")), [*BEGUN, said("", look("c1")), tool("x")], said("", look("c0"))) == []
    assert of_two("Hm.", [*BEGUN, said("Hm."), user("?"), said("I look."), user("!")], "I look.") == []
    attempt = Attempt()
    attempt.call([TASK], "Hm.")
    attempt.together(BEGUN, *(f"answer {n}" for n in range(8)))
    assert attempt.unused == []
    attempt.call([*BEGUN, said("answer 3"), user("?")], "end")
    assert attempt.unused == [1, 2, 3, 5, 6, 7, 8]


def test_an_agent_that_keeps_no_history_throws_nothing_away() -> None:
    attempt = Attempt()
    shot = [user("Where to?"), said("north")]
    for place, move in [("wood", "dance"), ("wood", "north"), ("you go north: hill", "south"), ("wood", "up")]:
        attempt.call([*shot, user(place)], move)
    assert attempt.unused == []
    attempt, seen = Attempt(), [TASK]
    for number in range(3):
        attempt.call(seen, f"answer {number}")
        seen = [*seen, user(f"observation {number}")]
    assert attempt.unused == []


def test_raw_prompts() -> None:
    attempt = Attempt()
    attempt.together("Q:", " no", " ab", "")
    attempt.call("Q: ab\nQ:", " no")
    attempt.call("Q: ab\nQ:", " c")
    attempt.call("Q: ab\nQ: c\nQ:", " d")
    assert attempt.unused == [0, 2, 3] and attempt.answers.unused({0, 1, 2, 4, 5}) == [0, 2]
    attempt.call("Q: ab\nQ:c\nQ:d\nQ:", " e")  # stripped
    assert attempt.unused == [0, 2, 3]


def test_a_turn_that_is_continued_is_used() -> None:
    attempt = Attempt()
    attempt.call([TASK], "no")
    attempt.call([TASK], "Anna")
    attempt.call([TASK, said("Anna")], " plays.")
    attempt.call([TASK, said("Anna plays."), user("?")], "end")
    assert attempt.unused == [0]


# Agents of a run


Agent = Callable[[Task, Any], Awaitable[float]]


async def fates(agent: Agent, text: Callable[[str, int], str], **settings: Any) -> tuple[list[Any], Trajectory]:
    """Play an attempt; return why each of its steps is dropped, and the attempt."""
    config = RolloutConfig(max_steps=20, max_input_tokens=4000, **settings)
    players = Players({}, {"a": agent}, {})  # type: ignore[dict-item]
    async with open_rollouts(Slow(scripted(text)), plain_renderer(), players, config) as rollouts:
        trajectory = await rollouts.start("g", Task("t", [TASK], agent="a"), addresses())[0]
    assert trajectory.failure is None, trajectory.failure
    return [step.dropped for step in trajectory.steps], trajectory


async def chat(client: Any, *messages: Any, **options: Any) -> Any:
    answer = await client.chat.completions.create(model="m", messages=messages, **options)
    return answer.choices[0].message.model_dump(exclude_none=True)


OUT = DropReason.REJECTED


async def test_a_reply_that_is_asked_for_again_is_neither_played_nor_trained() -> None:
    async def retries(task: Task, client: Any) -> float:
        history = list(task.prompt)
        for _ in range(2):
            await chat(client, *history)
            history += [await chat(client, *history), user("and?")]
        history.append(await chat(client, *history))
        await chat(client, user("a title, please"))
        return 1.0

    dropped, trajectory = await fates(retries, lambda prompt, number: f"answer {number}.")
    assert dropped == [OUT, None, OUT, None, None, None] and trajectory.reward == 1.0
    assert [len(view(trajectory).steps) for view in (as_played, as_trained)] == [4, 4]
    assert [step.break_cause for step in trajectory.steps] == [None] * 6
    dropped, _ = await fates(retries, lambda prompt, number: f"answer {number}.", infer_rejected=False)
    assert dropped == [None] * 6


@pytest.mark.xdist_group("anthropic")
async def test_a_compaction_as_claude_code_does_it() -> None:
    """A title beside the first call, in doubt; a summary that is asked for again; then only what stood in its tags."""

    async def compacts(task: Task, client: Any) -> float:
        async with anthropic_client(client) as sdk:

            async def ask(*messages: Any) -> Any:
                answer = await sdk.messages.create(model="m", max_tokens=200, messages=messages)
                return {"role": "assistant", "content": [block.model_dump() for block in answer.content]}

            start = user("Who plays chess?")
            _, first = await asyncio.gather(ask(user("Write a title.")), ask(start))
            history = [start, first, user("go on")]
            history += [await ask(*history), user("Summarise.")]
            await ask(*history)
            summary = (await ask(*history))["content"][0]["text"]
            kept = summary.partition("<summary>")[2].partition("</summary>")[0]
            history = [user(f"This session is continued. Summary:{kept}")]
            await ask(*history, await ask(*history), user("?"))
        return 1.0

    def text(prompt: str, number: int) -> str:
        summary = f"<analysis>{number}</analysis><summary>\n{number}: {LONG}\n</summary>"
        return summary if "Summarise" in prompt else f"answer {number}."

    dropped, trajectory = await fates(compacts, text)
    written = [plain_renderer().text(step.completion_ids) for step in trajectory.steps]
    assert [w for w, why in zip(written, dropped, strict=True) if why is OUT] == [written[3]]
    assert dropped.count(None) == 6 and written[3].startswith("<analysis>3")


async def test_best_of_n_inside_an_agent() -> None:
    async def votes(task: Task, client: Any) -> float:
        several = await client.chat.completions.create(model="m", messages=[TASK], n=4)
        best = several.choices[2].message.model_dump(exclude_none=True)
        history = [TASK, best, user("and?")]
        await asyncio.gather(*(chat(client, *history) for _ in range(3)))  # a vote, which nobody is told
        return 1.0

    dropped, _ = await fates(votes, lambda prompt, number: f"answer {number}.")
    assert dropped == [OUT, OUT, None, OUT, None, None, None]


async def test_a_sub_agent_of_which_only_the_result_goes_on() -> None:
    async def delegates(task: Task, client: Any) -> float:
        first = await chat(client, *task.prompt)
        own = [user("Look for Anna.")]
        for _ in range(2):
            own += [await chat(client, *own), user("and?")]
        await chat(client, *own)
        result = await chat(client, *own)
        history = [*task.prompt, first, user(f"Your helper: {result['content']}")]
        await chat(client, *history)
        return 1.0

    dropped, _ = await fates(delegates, lambda prompt, number: f"answer {number}.")
    assert dropped == [None, None, None, OUT, None, None]


@pytest.mark.xdist_group("anthropic")
async def test_agents_may_say_what_they_reject_and_what_they_accept() -> None:
    async def says(task: Task, client: Any) -> float:
        def telling(**answers: Any) -> Any:
            return {f"x-treadle-{name}": ", ".join(a.id for a in given) for name, given in answers.items()}

        asked: Any = {"model": "m", "messages": [TASK]}
        parsed = await client.chat.completions.create(**asked)
        first = await client.chat.completions.create(**asked, extra_headers=telling(accepts=[parsed]))
        raw = await client.completions.create(model="m", prompt="Q:")
        response = await client.responses.create(model="m", input="hi")
        kept = first.choices[0].message.model_dump(exclude_none=True)
        history = [TASK, kept, user(f"{raw.choices[0].text} {response.output_text}")]
        headers = telling(rejects=[raw, response])
        async with anthropic_client(client) as sdk:
            asked = {"model": "m", "max_tokens": 9, "messages": [user("hi")]}
            message = await sdk.messages.create(**asked, extra_headers=headers)
            await sdk.messages.create(**asked, extra_headers=telling(rejects=[message]))
        with pytest.raises(Exception, match="x-treadle-rejects: no answer has the id 'msg_9'; give the ids of answers"):
            await chat(client, *history, extra_headers={"x-treadle-rejects": "msg_9"})
        await chat(client, *history)
        return 1.0

    dropped, trajectory = await fates(says, lambda prompt, number: f"answer {number}.")
    assert dropped == [None, None, OUT, OUT, OUT, None, None] and "1 of its requests" in trajectory.warning
