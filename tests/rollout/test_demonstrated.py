"""A demonstration's replies are what the family's model would write: calls and thoughts, up to an end token."""

import json
from functools import cache
from typing import Any

import pytest

from tests.rollout.families import FAMILIES, WRITING_TOOLS, World, small_vocabulary
from tests.rollout.test_arguments import READING
from tests.worlds import CHATML, END, PlainTokenizer, user
from treadle.core.errors import DataError
from treadle.core.types import FunctionCall, Message, ToolCall
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.training.demonstrations import demonstrated_calls

EVERY = {**FAMILIES, **WRITING_TOOLS}
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "-",
        "parameters": {"type": "object", "properties": {"who": {"type": "string"}, "deep": {"type": "integer"}}},
    },
}
ARGUMENTS = '{"who": "Anna", "deep": 2}'
CALL = ToolCall(id="c00000000", type="function", function=FunctionCall(name="look", arguments=ARGUMENTS))

THINKING = [name for name in READING if EVERY[name].thoughts in ("opt", "prompt")]


ANSWER = Message(role="assistant", content="a friend of mine")


def talk(thought: str = "", answer: Message = ANSWER) -> list[Message]:
    call = Message(role="assistant", content="", tool_calls=[CALL], reasoning_content=thought)
    return [user("who?"), call, Message(role="tool", content="a friend", tool_call_id="c00000000"), answer]


@cache
def world(name: str) -> World:
    return World(EVERY[name], small_vocabulary())


def read(name: str, completion: Any, prompt: Any) -> Message:
    renderer = world(name).renderer
    assert int(completion[-1]) in renderer.stop_ids
    begun = "<think>" if renderer.decode(prompt).rstrip().endswith("<think>") else ""
    return renderer.parser("auto")(begun + renderer.text(completion), [LOOK])


@pytest.mark.parametrize("name", READING)
def test_calls_are_learned_as_the_template_writes_them(name: str) -> None:
    (prompt, call), (later, answer) = demonstrated_calls(talk(), world(name).renderer, [LOOK])
    [found] = read(name, call, prompt)["tool_calls"]
    assert found["function"]["name"] == "look"
    assert json.loads(found["function"]["arguments"]) == {"who": "Anna", "deep": 2}
    assert read(name, answer, later)["content"] == "a friend of mine"
    assert "look" in world(name).renderer.decode(prompt)  # the tool


@pytest.mark.parametrize("name", EVERY)
def test_answers_are_learned_as_the_template_writes_them(name: str) -> None:
    """With what it puts around a reply: gpt-oss's channel, the empty thought of Qwen 3."""
    if name == "deepseekv3":  # which prompts for a thought that it does not write
        return
    renderer, messages = world(name).renderer, [user("who?"), Message(role="assistant", content="Anna")]
    [(prompt, answer)] = demonstrated_calls(messages, renderer)
    shown: Any = messages
    text = renderer.write(shown, None, renderer.options, generation_prompt=False)
    written = renderer.structure.plain(text)
    learned = renderer.decode(prompt) + renderer.decode(answer)
    assert int(answer[-1]) in renderer.stop_ids
    assert learned.startswith(written.rstrip()) or written.startswith(learned) or "<think>\n</think>" in learned


@pytest.mark.parametrize("name", ["gptoss", *THINKING])
def test_thoughts_are_learned_too(name: str) -> None:
    (prompt, call), (later, answer) = demonstrated_calls(
        talk("hm, Anna", Message(role="assistant", content="a friend", reasoning_content="so")),
        world(name).renderer,
        [LOOK],
    )
    assert read(name, call, prompt)["reasoning_content"] == "hm, Anna"
    assert read(name, answer, later)["reasoning_content"] == "so"
    assert read(name, answer, later)["content"] == "a friend"


@pytest.mark.parametrize("name", EVERY)
def test_what_is_learned_is_kept_by_the_next_prompt_as_a_sampled_reply_is(name: str) -> None:
    renderer = world(name).renderer
    reply = Message(role="assistant", content="a friend")
    conversation = Conversation(renderer)
    prompt = conversation.render([user("who?")])
    if name == "deepseekv3":
        with pytest.raises(DataError, match=r"writes this reply as .*a friend.*, and prompts for it with .*<think>"):
            conversation.demonstrated([user("who?"), reply])
        return
    completion = conversation.demonstrated([user("who?"), reply])
    conversation.record(prompt, completion, renderer.parser("auto")(renderer.text(completion), []))
    assert "a friend" in renderer.text(completion)
    assert conversation.render([user("who?"), reply, user("and?")]).ids.size > prompt.ids.size


def test_what_the_template_leaves_out_is_refused() -> None:
    silent = CHATML.replace("calls(m) +", "")
    with pytest.raises(DataError, match="the chat template leaves out the tool call of message 2"):
        demonstrated_calls(talk(), ChatRenderer(PlainTokenizer(silent), [END]), [LOOK])
    thoughtful = [user("q"), Message(role="assistant", content="a", reasoning_content="hm")]
    with pytest.raises(DataError, match="the chat template leaves out the thought of message 2"):
        demonstrated_calls(thoughtful, ChatRenderer(PlainTokenizer(), [END]))


def test_what_is_left_out_of_content_is_refused() -> None:
    with pytest.raises(DataError, match="the chat template leaves out 'hm' of this reply"):
        demonstrated_calls(
            [user("q"), Message(role="assistant", content="<think>hm</think>a")], world("around roles").renderer
        )


@pytest.mark.parametrize("arguments", ['{"who": "An', "[1]", "5", '"a"'])
def test_calls_whose_arguments_are_no_object_are_refused(arguments: str) -> None:
    call = ToolCall(id="", type="function", function=FunctionCall(name="look", arguments=arguments))
    messages = [user("q"), Message(role="assistant", content="", tool_calls=[call])]
    with pytest.raises(DataError, match="the arguments of a call of 'look' are no JSON object"):
        demonstrated_calls(messages, world("qwen3").renderer, [LOOK])


def test_a_reply_that_begins_otherwise_than_the_prompt_is_refused() -> None:
    with pytest.raises(DataError, match=r"the chat template writes this reply as .* and prompts for it with"):
        demonstrated_calls(
            [user("q"), Message(role="assistant", content="a", reasoning_content="hm")], world("qwen3_nothink").renderer
        )
