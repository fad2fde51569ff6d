"""Which answers an agent used: the rule alone, and through the gateway with unmodified clients."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.gateway.servers import Slow, scripted
from tests.rollout.kit import attempt, open_session
from tests.worlds import make_step, saying, tool, user
from treadle.core.outcomes import as_played, as_trained
from treadle.core.types import DropReason, Message, Task, ToolCall, Trajectory
from treadle.rollout.agents.clients import anthropic_client
from treadle.rollout.gateway.answers import Answers
from treadle.rollout.gateway.gateway import Access, Gateway
from treadle.rollout.gateway.request import CompletionRequest
from treadle.rollout.session import Reply

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


@dataclass
class Attempt:
    """The calls of one attempt; numbers are those of arrival."""

    answers: Answers = field(default_factory=Answers)
    count: int = 0

    def call(self, prompt: list[Message], *replies: Message | str) -> None:
        """One request, or several identical ones at a time."""
        for number, reply in [(self.answers.ask(), reply) for reply in replies]:
            message = said(reply) if isinstance(reply, str) else reply
            self.answers.answer(number, prompt, [Reply(message, make_step(), self.count)])
            self.count += 1

    @property
    def unused(self) -> list[int]:
        return self.answers.unused()


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


@given(st.lists(st.tuples(turns(), st.booleans()), min_size=1, max_size=6))
def test_an_answer_is_thrown_away_if_another_one_to_its_prompt_goes_on(conversation: list[tuple[Any, bool]]) -> None:
    attempt, history, thrown = Attempt(), [ASK, TASK], []
    for (reply, back, after), again in conversation:
        if again:
            thrown.append(attempt.count)
            attempt.call(history, f"draft {attempt.count}")
        attempt.call(history, reply)
        history = [*history, back, after]
    attempt.call(history, "the end")
    assert attempt.unused == thrown


def test_of_several_answers_the_one_that_goes_on_was_used() -> None:
    attempt = Attempt()
    attempt.call([TASK], *(f"answer {n}" for n in range(8)))
    assert attempt.unused == []
    attempt.call([TASK, said("answer 3"), user("?")], "end")
    assert attempt.unused == [0, 1, 2, 4, 5, 6, 7]
    attempt.call([TASK, said("answer 5")], "another branch")
    assert attempt.unused == [0, 1, 2, 4, 6, 7]


@pytest.mark.parametrize(
    "later",
    [
        [],
        [[TASK, said("I look."), user("!")]],  # equal to the other
        [[TASK, said('{"action": "look"}'), user("!")]],  # changed beyond recognition
        [[user("So far: I look. And now?")]],  # summarized
        [[TASK, user("A title?")]],  # left out
    ],
)
def test_in_doubt_an_answer_was_used(later: list[list[Message]]) -> None:
    attempt = Attempt()
    attempt.call([TASK], " I look.", "I look.")
    for prompt in later:
        attempt.call(prompt, "the end")
    assert attempt.unused == []


def test_an_answer_that_comes_after_another_goes_on_was_used() -> None:
    answers = Answers()
    first, second = answers.ask(), answers.ask()
    answers.answer(second, [TASK], [Reply(said("b"), make_step(), 1)])
    answers.answer(answers.ask(), [TASK, said("b"), user("?")], [Reply(said("c"), make_step(), 2)])
    answers.answer(first, [TASK], [Reply(said("a"), make_step(), 0)])
    assert answers.unused() == []


def test_an_agent_that_keeps_no_history_throws_nothing_away() -> None:
    attempt = Attempt()
    shot = [user("Where to?"), said("north")]
    for place, move in [("wood", "dance"), ("wood", "north"), ("you go north: hill", "south"), ("wood", "up")]:
        attempt.call([*shot, user(place)], move)
    assert attempt.unused == []


async def test_an_answer_that_nobody_got_stays_cancelled() -> None:
    gateway, session = Gateway(), open_session(saying("a"))
    clients, request = gateway.attach(session, Access(infer_rejected=True)), CompletionRequest("m", (TASK,))
    for ident in "ab":
        await clients.answer(request, ident)
    session.set_delivered(0, False)
    session.parse = lambda text, tools: said("b")
    got = (await clients.answer(request, "c")).replies[0]
    await clients.answer(replace(request, messages=(TASK, got.message, user("?"))), "d")
    await gateway.close()
    assert [step.dropped for step in session.steps] == [DropReason.CANCELLED, DropReason.REJECTED, None, None]


# Agents of a run


Agent = Callable[[Task, Any], Awaitable[float]]


async def fates(
    agent: Agent, text: Callable[[str, int], str], extras: dict[str, Any] | None = None, **settings: Any
) -> tuple[list[Any], Trajectory]:
    """Play an attempt; return why each of its steps is dropped, and the attempt."""
    settings = {"max_steps": 20, "max_input_tokens": 4000, **settings}
    trajectory = await attempt(agent, Slow(scripted(text)), [TASK], extras, **settings)
    assert trajectory.failure is None, trajectory.failure
    return [step.dropped for step in trajectory.steps], trajectory


async def chat(client: Any, *messages: Any, **options: Any) -> Any:
    answer = await client.chat.completions.create(model="m", messages=messages, **options)
    return answer.choices[0].message.model_dump(exclude_none=True)


OUT = DropReason.REJECTED


async def test_in_doubt_a_reply_that_the_agent_began_was_used() -> None:
    async def retries(task: Task, client: Any) -> float:
        history = [ASK, TASK]
        begun = said("I say")
        for _ in range(2):
            answer = await chat(client, *history, begun, extra_body={"continue_final_message": True})
        other = await chat(client, *history)
        history += [said(f"I say{answer['content']}"), user("and?")]
        await chat(client, *history, other, user("so?"))
        await chat(client, *history)
        return 1.0

    dropped, _ = await fates(retries, lambda prompt, number: f"answer {number}.")
    assert dropped == [None] * 5


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


async def test_a_summary_that_is_asked_for_again_is_rejected_by_its_agent() -> None:
    async def compacts(task: Task, client: Any) -> float:
        history = [TASK, await chat(client, TASK), user("Summarize.")]
        draft = await client.chat.completions.create(model="m", messages=history)
        summary = await chat(client, *history)
        headers = {"x-treadle-rejects": draft.id} if task.extras["says"] else None
        await chat(client, user(f"So far: {summary['content']}"), extra_headers=headers)
        return 1.0

    for says, fate in ((True, OUT), (False, None)):
        dropped, _ = await fates(compacts, lambda prompt, number: f"answer {number}.", extras={"says": says})
        assert dropped == [None, fate, None, None]


async def test_best_of_n_inside_an_agent() -> None:
    async def votes(task: Task, client: Any) -> float:
        several = await client.chat.completions.create(model="m", messages=[TASK], n=4)
        best = several.choices[2].message.model_dump(exclude_none=True)
        history = [TASK, best, user("and?")]
        await asyncio.gather(*(chat(client, *history) for _ in range(3)))  # a vote, which nobody is told
        return 1.0

    dropped, _ = await fates(votes, lambda prompt, number: f"answer {number}.")
    assert dropped == [OUT, OUT, None, OUT, None, None, None]


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
