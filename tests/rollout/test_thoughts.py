"""A thought is one until it is closed, whoever opened it; where a template has no place for it, it stays text."""

import asyncio
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.rollout.families import FAMILIES, WRITING_TOOLS, World, small_vocabulary
from tests.worlds import CHATML, END, PlainTokenizer, saying, user
from treadle.core.draws import Stream
from treadle.core.types import Message, SamplingParams
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import ReplyParser, hermes, plain, thinking
from treadle.rollout.gateway.chat_completions import AssistantMessage
from treadle.rollout.gateway.messages import AssistantTurn
from treadle.rollout.gateway.responses import Item, read_items
from treadle.rollout.session import Address, CallOptions, Session, SessionSpec
from treadle.testing import FakeEngine

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
LOOK: Any = {"type": "function", "function": {"name": "look", "description": "-", "parameters": {"type": "object"}}}
NO_OPTIONS = CallOptions()
OPENING = CHATML.replace(
    "assistant\n' }}{% endif %}",
    "assistant\n' + ('<think>\n' if enable_thinking | default(true) else '<think>\n\n</think>\n\n') }}{% endif %}",
)


def opened(renderer: ChatRenderer, parse: ReplyParser, engine: FakeEngine) -> Session:
    address = Address(0, Stream.TRAIN, 0, 0, 0)
    return Session(SessionSpec("s", engine, renderer, SamplingParams(), 10_000, address), parse)


def said(text: str, parse: ReplyParser, options: CallOptions = NO_OPTIONS, *history: Message) -> Message:
    session = opened(ChatRenderer(PlainTokenizer(OPENING), [END]), parse, saying(text, end=False))
    tools = [] if parse in (plain, thinking) else [LOOK]
    return asyncio.run(session.chat([user("q <think>"), *history], tools, options)).message


@pytest.mark.parametrize("parse", [hermes, thinking])
def test_what_is_cut_within_a_thought_that_the_prompt_opened_is_thought(parse: ReplyParser) -> None:
    assert said(f"hm {CALL}", parse) == {"role": "assistant", "content": "", "reasoning_content": f"hm {CALL}"}


def test_behind_the_thought_a_call_is_one() -> None:
    message = said(f"hm</think>{CALL}", hermes)
    assert message["reasoning_content"] == "hm"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["look"]


def test_a_prompt_that_closes_the_thought_opens_none() -> None:
    message = said(f"so {CALL}", hermes, CallOptions(template_kwargs={"enable_thinking": False}))
    assert message["content"] == "so"
    assert "reasoning_content" not in message and len(message["tool_calls"]) == 1


def test_a_thought_that_the_caller_began_goes_on() -> None:
    options = CallOptions(template_kwargs={"enable_thinking": False}, continue_final_message=True)
    message = said("hm", thinking, options, Message(role="assistant", content="<think>\nlet"))
    assert (message["content"], message["reasoning_content"]) == ("", "hm")


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "deepseekv3"])
def test_of_families_that_open_one(name: str) -> None:
    world = World({**FAMILIES, **WRITING_TOOLS}[name], small_vocabulary())
    engine = FakeEngine(lambda prompt, sampling: world.tokenizer.encode("hm", add_special_tokens=False).ids)
    session = opened(world.renderer, world.renderer.parser("auto"), engine)
    message = asyncio.run(session.chat([user("q")])).message
    assert message == {"role": "assistant", "content": "", "reasoning_content": "hm"}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_a_thought_that_the_template_has_no_place_for_stays_and_breaks_nothing(name: str) -> None:
    world = World(FAMILIES[name], small_vocabulary())
    text = f"<think>\nhm {CALL}\n</think>\n\nyes"

    def reply(prompt: Any, sampling: Any) -> list[int]:
        return [*world.tokenizer.encode(text, add_special_tokens=False).ids, world.stops[0]]

    session = opened(world.renderer, world.renderer.parser("auto"), FakeEngine(reply))

    async def two_turns() -> Message:
        message = (await session.chat([user("q")], [LOOK])).message
        await session.chat([user("q"), message, user("r")], [LOOK])
        return message

    assert asyncio.run(two_turns()) == {"role": "assistant", "content": text}
    assert [step.break_cause for step in session.steps] == [None, None]


# Several thoughts of one turn


def test_both_thinking_blocks_of_anthropics_client_are_kept() -> None:
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""} for thought in ("one", "two")]
    turn = AssistantTurn.model_validate({"role": "assistant", "content": [*blocks, {"type": "text", "text": "yes"}]})
    assert turn.messages() == [Message(role="assistant", content="yes", reasoning_content="one\ntwo")]


def test_both_reasoning_items_of_openais_client_are_kept() -> None:
    thoughts: list[Any] = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]}
        for thought in ("one", "two")
    ]
    items = TypeAdapter(list[Item]).validate_python(
        [*thoughts, {"type": "message", "role": "assistant", "content": "a"}]
    )
    assert read_items(items) == (Message(role="assistant", content="a", reasoning_content="one\ntwo"),)
    [first, second] = read_items([*items, items[0]])
    assert (first["reasoning_content"], second["reasoning_content"]) == ("one\ntwo", "one")


def test_a_summary_is_the_thought_where_there_is_no_other() -> None:
    parts: Any = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "content": None}
    for more, expected in (({}, "so"), ({"content": [{"type": "reasoning_text", "text": "hm"}]}, "hm")):
        items = [{**parts, **more}, {"type": "message", "role": "assistant", "content": "a"}]
        [message] = read_items(TypeAdapter(list[Item]).validate_python(items))
        assert message["reasoning_content"] == expected


def test_a_thought_under_its_other_name_is_kept() -> None:
    sent = {"role": "assistant", "content": "a", "reasoning_content": "", "reasoning": "hm"}
    assert AssistantMessage.model_validate(sent).message()["reasoning_content"] == "hm"
