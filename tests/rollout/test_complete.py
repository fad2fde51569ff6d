"""No message vanishes: what a caller sends stands in the prompt, or the call is refused with role and remedy."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.families import FAMILIES, WRITING_TOOLS, World, small_vocabulary
from tests.worlds import plain_renderer, tool, user
from treadle.core.errors import DataError
from treadle.core.types import Message
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation

ALL = {**FAMILIES, **WRITING_TOOLS}
DEVELOPER: Message = {"role": "developer", "content": "Always answer in French."}
QUESTION, ANSWER = user("What is it?"), Message(role="assistant", content="It is tea.")
CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": '{"at": "tea"}'}}],
}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


@cache
def world(name: str) -> World:
    return World(ALL[name], small_vocabulary())


def mapped(name: str, **roles: str) -> ChatRenderer:
    family = world(name)
    return ChatRenderer(family.hf, family.stops, chat_template_kwargs=family.family.options, roles=roles)


def said(name: str, messages: list[Message], tools: list[Any], renderer: ChatRenderer | None = None) -> str | None:
    """The prompt as text; None if it is refused."""
    try:
        prompt = Conversation(renderer or world(name).renderer).render(messages, tools)
    except DataError:
        return None
    return world(name).decode(prompt.ids)


@pytest.mark.parametrize("name", ALL)
def test_what_stands_before_a_thought_in_content_does_not_vanish_with_it(name: str) -> None:
    thoughtful = Message(role="assistant", content="It was <think>hm</think> tea.")
    text = said(name, [QUESTION, thoughtful, QUESTION], [])
    refusing = "deepseekv3", "around roles", "nemotron_3_nano", "nemotron_3_super"
    assert text is None if name in refusing else text is not None and "It was" in text and "tea." in text


@pytest.mark.parametrize("name", [name for name, family in ALL.items() if family.tools])
@pytest.mark.parametrize(
    "arguments", ['["zqz", 1]', '{"q": "zqz", "q": 1}', '{"q": "zqz"', '"zqz"', '{"q": "zqz", "n": 1e999}']
)
def test_arguments_that_are_no_object_are_written_or_refused(name: str, arguments: str) -> None:
    """A client may send back what another model wrote."""
    [call] = CALLING["tool_calls"]
    sent = {**CALLING, "tool_calls": [{**call, "function": {"name": "look", "arguments": arguments}}]}
    text = said(name, [QUESTION, sent, {**tool("r"), "tool_call_id": "abcdefghi"}], [LOOK])  # type: ignore[list-item]
    assert text is None or "zqz" in text


@pytest.mark.parametrize("long", [1, 100_000])
def test_half_a_character_is_refused(long: int) -> None:
    with pytest.raises(DataError, match="lone surrogate"):
        Conversation(plain_renderer()).render([user("a\ud800" * long)])


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "glm4moe", "deepseekv3", "phi3_5", "cohere2", "gemma4"])
def test_a_role_that_the_template_drops_is_refused_with_its_remedy(name: str) -> None:
    dropped, shown = (tool("12:00"), "user") if name == "gemma4" else (DEVELOPER, "system")
    talk = [QUESTION, ANSWER, dropped] if dropped["role"] == "tool" else [dropped, QUESTION]
    with pytest.raises(DataError, match=rf"leaves out the content of message \d \({dropped['role']}: .*model\.roles"):
        Conversation(world(name).renderer).render(talk)
    text = said(name, talk, [], mapped(name, **{dropped["role"]: shown}))
    assert text is not None and dropped["content"] in text


def test_calls_of_a_template_without_tools_are_refused_unless_the_model_made_them() -> None:
    """Of a recorded reply it is a break, which has its cause."""
    renderer = world("phi3_5").renderer
    assert said("phi3_5", [QUESTION, {**CALLING, "content": "Well."}, QUESTION], []) is None
    conversation = Conversation(renderer)
    prompt = conversation.render([QUESTION])
    conversation.record(prompt, np.array([*renderer.encode("Well."), world("phi3_5").stops[0]], np.int32), CALLING)
    assert conversation.render([QUESTION, CALLING, QUESTION]).break_cause is not None


def test_thoughts_are_left_out_before_the_last_question_alone() -> None:
    thoughtful: Message = {**ANSWER, "reasoning_content": "Tea or coffee?"}
    assert said("qwen3", [QUESTION, thoughtful, QUESTION], []) is not None
    with pytest.raises(DataError, match=r"leaves out the thought of message 2 \(assistant: 'thought'\)"):
        Conversation(world("qwen2_5").renderer).render([QUESTION, thoughtful, tool("milk")])


PARTS = st.sampled_from(["system", "developer", "user", "assistant", "thinking", "calling", "tool", "observation"])


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60)
@given(kinds=st.lists(PARTS, min_size=1, max_size=6), tools=st.booleans(), alike=st.booleans())
def test_whatever_is_sent_stands_in_the_prompt_or_is_refused(
    name: str, kinds: list[str], tools: bool, alike: bool
) -> None:
    """alike: all say the same, so that what is left out stands somewhere else."""
    messages: list[Message] = []
    for number, kind in enumerate(kinds):
        word = "qzeta" if alike else f"qz{'abcdef'[number]}eta"
        message: Message = {"role": kind, "content": word}
        if kind in ("thinking", "calling"):
            message["role"] = "assistant"
        if kind == "thinking":
            message["reasoning_content"] = f"th{word}"
        if kind == "calling":
            call: Any = {"id": f"abcdefgh{number}", "type": "function"}
            call["function"] = {"name": "look", "arguments": f'{{"at": "a{word}"}}'}
            message["tool_calls"] = [call]
        messages.append(message)
    text = said(name, messages, [LOOK] if tools and ALL[name].tools else [])
    if text is None:
        return
    if name.startswith("cohere") and alike and kinds.count("system") > 1:
        return  # one that says the same again is left out
    question = max((n for n, kind in enumerate(kinds) if kind == "user"), default=-1)
    for number, message in enumerate(messages):
        assert text.count(message["content"]) >= (len(messages) if alike else 1)
        if "reasoning_content" in message and number > question:
            assert message["reasoning_content"] in text
        for called in message.get("tool_calls", ()):
            assert f"a{message['content']}" in text and called["function"]["name"] in text


# Several system messages


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6", "qwen3_8", "gptoss", "cohere", "gemma3"])
def test_system_messages_are_one_where_the_template_wants_one_first(name: str) -> None:
    renderer = World({**FAMILIES, **WRITING_TOOLS}[name], small_vocabulary()).renderer
    talk = Conversation(renderer)
    said = ("system", "be brief"), ("user", "who?"), ("assistant", "Anna"), ("system", "be kind"), ("user", "well?")
    messages = [Message(role=role, content=content) for role, content in said]
    prompt = talk.render(messages)
    text = renderer.decode(prompt.ids)
    assert text.index("be brief") < text.index("be kind") < text.index("who?") < text.index("well?")
    assert [m["role"] for m in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.messages[0]["content"] == "be brief\n\nbe kind"
    assert (talk.render([messages[3], messages[1]]).ids == talk.render([messages[1], messages[3]]).ids).all()


def test_elsewhere_they_stay_where_they_are() -> None:
    renderer = World(FAMILIES["qwen3"], small_vocabulary()).renderer
    said = [("system", "be brief"), ("user", "who?"), ("system", "be kind"), ("user", "well?")]
    prompt = Conversation(renderer).render([Message(role=role, content=content) for role, content in said])
    assert [m["role"] for m in prompt.messages] == ["system", "user", "system", "user"]
