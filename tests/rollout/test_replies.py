"""What a model wrote becomes a message; nothing that it can write is lost or raises."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treadle.core.errors import ConfigError
from treadle.core.types import Message
from treadle.rendering.replies import (
    ReplyParser,
    Tool,
    glm,
    harmony,
    hermes,
    llama,
    plain,
    qwen_xml,
    reply_parser,
    thinking,
)

LOOK: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"who": {"type": "string"}, "deep": {"type": "integer"}}},
    },
}
TOOLS = [LOOK]
PARSERS = [plain, thinking, hermes, qwen_xml, glm, llama, harmony]


def calls(message: Message) -> list[tuple[str, object]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]


@pytest.mark.parametrize("parse", [thinking, hermes, qwen_xml])
@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("hm\n</think>\n\nyes", "hm", "yes"),
        ("<think>never ends", "never ends", ""),
        ("<think></think>yes", "", "yes"),
        (" yes ", "", " yes "),
        ("a </think> b </think> c", "a", " b </think> c"),
    ],
)
def test_thoughts(parse: ReplyParser, text: str, thought: str, content: str) -> None:
    message = parse(text, TOOLS)
    assert (message.get("reasoning_content", ""), message["content"]) == (thought, content)


def test_hermes_calls() -> None:
    text = (
        'I look.\n<tool_call>\n{"name": "look", "arguments": {"who": "Änna"}}\n</tool_call>\n'
        '<tool_call>{"name": "look", "arguments": "{\\"deep\\": 1}"}</tool_call>'
    )
    message = hermes(text, TOOLS)
    assert message["content"] == "I look."
    assert calls(message) == [("look", {"who": "Änna"}), ("look", {"deep": 1})]
    assert [c["id"] for c in message["tool_calls"]] == ["", ""]


def test_qwen_xml_calls_take_types_from_the_schema() -> None:
    text = (
        "<tool_call>\n<function=look>\n<parameter=who>\n7\n</parameter>\n<parameter=deep>\n7\n</parameter>\n"
        "<parameter=other>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>"
    )
    assert calls(qwen_xml(text, TOOLS)) == [("look", {"who": "7", "deep": 7, "other": "two\nlines"})]
    assert calls(qwen_xml("<tool_call><function=look></function></tool_call>", TOOLS)) == [("look", {})]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{broken</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"x": "\\ud800"}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "look", "arguments": {}}',
        '<tool_call>{"name": "look", "args": {"who": "Anna"}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {}, "parameters": {"who": "Anna"}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"who": "Anna", "who": "Bob"}}</tool_call>',
        "<tool_call><function=look><parameter=who>\na</parameter><parameter=deep>\n</parameter></function></tool_call>",
        "<tool_call>look at Anna</tool_call>",
    ],
)
@pytest.mark.parametrize("parse", [hermes, qwen_xml])
def test_a_malformed_call_stays_content(parse: ReplyParser, text: str) -> None:
    assert parse(f"so: {text} ", TOOLS) == {"role": "assistant", "content": f"so: {text} "}


WRITTEN: dict[ReplyParser, str] = {
    hermes: '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
    qwen_xml: "<tool_call>\n<function=look>\n</function>\n</tool_call>",
    glm: "<tool_call>look\n</tool_call>",
}


@pytest.mark.parametrize("parse", WRITTEN)
@pytest.mark.parametrize(
    "around",
    [
        "Sure. <think>then {}</think> yes",
        "Sure. <think>cut: {}",
        "<tool_call>{{'name': 'write', 'arguments': {{'text': '{}'}}}}</tool_call>",
        "<tool_call>{{'name': 'write', 'arguments': {{'text': '{} and cut",
        "<tool_call>\n<function=write>\n<parameter=text>\nuse {} and cut",
        "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n<parameter=b>\n5\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>use {} and cut",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>b</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    ],
)
def test_a_call_within_a_later_thought_or_a_call_that_cannot_be_read_is_none(parse: ReplyParser, around: str) -> None:
    text = around.format(WRITTEN[parse])
    assert parse(text, TOOLS) == {"role": "assistant", "content": text}
    assert parse(f"<think>so</think>{text}", TOOLS)["content"] == text
    behind = parse(f"{WRITTEN[parse]}{text}", TOOLS)
    assert (behind["content"], len(behind.get("tool_calls", ()))) in [(text, 1), (WRITTEN[parse] + text, 0)]


@pytest.mark.parametrize("parse", WRITTEN)
def test_a_call_that_cannot_be_read_leaves_the_others(parse: ReplyParser) -> None:
    call, broken = WRITTEN[parse], "<tool_call>look at</tool_call>"
    message = parse(f"a {call} b {broken} c {call} d", TOOLS)
    assert message["content"] == f"a  b {broken} c  d"
    assert calls(message) == [("look", {})] * 2


def test_llama_calls_are_nothing_else() -> None:
    call = '{"name": "look", "parameters": {"who": "</think>"}}'
    assert calls(llama(call, TOOLS)) == [("look", {"who": "</think>"})]
    for text in ('{"name": "look", "results": [1]}', f"{call} so"):
        assert llama(text, TOOLS) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("parse", [hermes, qwen_xml])
def test_without_tools_a_call_is_content(parse: ReplyParser) -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert parse(text, []) == {"role": "assistant", "content": text}


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=who>"),
        *(
            "<|channel|>",
            "analysis",
            "commentary",
            "<|message|>",
            "<|end|>",
            "<|start|>assistant",
            " to=functions.look",
        ),
        *("<arg_key>who</arg_key>", "<arg_value>", "</arg_value>", "look", " to=functions.look"),
        *("</parameter>", '{"name": "look", "arguments": {"who": "x"}}', "{", "}", '"', "\n", "\\ud800", "1e999"),
    ]
)


def without_think(text: str) -> str:
    return "".join(text.replace("<think>", "").replace("</think>", "").split())


@given(st.lists(PIECES | st.text(max_size=5)).map("".join), st.sampled_from(PARSERS))
@example("<think><|end|>", harmony)
def test_no_text_makes_a_parser_raise_and_no_letter_is_lost(text: str, parse: ReplyParser) -> None:
    message = parse(text, TOOLS)
    for _name, arguments in calls(message):
        assert isinstance(arguments, dict)
    parts = without_think(message["content"] + message.get("reasoning_content", ""))
    if "tool_calls" not in message:
        assert parts in without_think(text) or sorted(parts) == sorted(without_think(text))


def test_parsers_by_name() -> None:
    assert reply_parser("treadle.rendering.replies:qwen_xml") is qwen_xml
    with pytest.raises(ConfigError, match=r"rollout\.reply_parser: 'hermess' is not registered"):
        reply_parser("hermess")
