"""What a model wrote becomes a message; nothing that it can write is lost or raises."""

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.rollout.families import LOOK, READING, world
from treadle.core.errors import ConfigError
from treadle.core.types import Message
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.replies import (
    FORMATS,
    Ambiguous,
    ReplyParser,
    glm,
    harmony,
    hermes,
    llama,
    parser_name,
    plain,
    qwen_xml,
    reply_parser,
    thinking,
    value_of,
)

TOOLS = [LOOK]
PARSERS = [plain, thinking, hermes, qwen_xml, glm, llama, harmony]


def called(message: Message) -> list[tuple[str, object]]:
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
    assert called(message) == [("look", {"who": "Änna"}), ("look", {"deep": 1})]
    assert [c["id"] for c in message["tool_calls"]] == ["", ""]


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
    text, untyped = around.format(WRITTEN[parse]), {"type": "object", "properties": {"b": {}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": untyped}}]
    assert parse(text, tools) == {"role": "assistant", "content": text}
    assert parse(f"<think>so</think>{text}", tools)["content"] == text
    behind = parse(f"{WRITTEN[parse]}{text}", tools)
    assert (behind["content"], len(behind.get("tool_calls", ()))) in [(text, 1), (WRITTEN[parse] + text, 0)]


@pytest.mark.parametrize("parse", WRITTEN)
def test_a_call_that_cannot_be_read_leaves_the_others(parse: ReplyParser) -> None:
    call, broken = WRITTEN[parse], "<tool_call>look at</tool_call>"
    message = parse(f"a {call} b {broken} c {call} d", TOOLS)
    assert message["content"] == f"a  b {broken} c  d"
    assert called(message) == [("look", {})] * 2


def test_llama_calls_are_nothing_else() -> None:
    call = '{"name": "look", "parameters": {"who": "</think>"}}'
    assert called(llama(call, TOOLS)) == [("look", {"who": "</think>"})]
    for text in ('{"name": "look", "results": [1]}', f"{call} so"):
        assert llama(text, TOOLS) == {"role": "assistant", "content": text}


@pytest.mark.parametrize("parse", [hermes, qwen_xml])
def test_without_tools_a_call_is_content(parse: ReplyParser) -> None:
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert parse(text, []) == {"role": "assistant", "content": text}


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=who>"),
        *("<|channel|>", "analysis", "commentary", "<|message|>", "<|end|>", "<|start|>assistant"),
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
    for _name, arguments in called(message):
        assert isinstance(arguments, dict)
    parts = without_think(message["content"] + message.get("reasoning_content", ""))
    if "tool_calls" not in message:
        assert parts in without_think(text) or sorted(parts) == sorted(without_think(text))


def test_parsers_by_name() -> None:
    assert reply_parser("treadle.rendering.replies:qwen_xml") is qwen_xml
    with pytest.raises(ConfigError, match=r"rollout\.reply_parser: 'hermess' is not registered"):
        reply_parser("hermess")


# Arguments of tool calls: as a template writes them, so they are read back, or the call is not read at all


Json = Any

TAGS = (
    *("</parameter>", "</tool_call>", "</function>", "<tool_call>", "<parameter=q>", "<function=f>", "</think>"),
    *("</arg_value>", "<arg_key>", "</arg_key>", "<arg_value>", "<|call|>", "<|end|>", "<|message|>", "<think>"),
)
WORDS = (*TAGS, "true", "True", "None", "null", "5", "-1.5", '"q"', "{}", "[1]", "\n", " ", "'", "\\n", "é", "a", "1e3")
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=5).map("".join)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = SCALARS | st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
)
SWALLOWED = re.compile(r"\n</parameter>\s*<parameter=.*>\n|</arg_value>\s*<arg_key>.*<arg_value>", re.DOTALL)
"""What makes one argument of several, or one call, to any reader."""


def kind(value: Json) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Json], dict[str, Json]]:
    """Arguments and a schema that they are valid under."""
    arguments = draw(st.dictionaries(st.sampled_from(["q", "path", "n", " q", ""]), VALUES, max_size=3))
    properties, parts = {}, {}
    for key, value in arguments.items():
        own, other = {"type": kind(value)}, {"type": draw(st.sampled_from(["string", "null", "integer", "boolean"]))}
        parts[key] = own
        properties[key] = draw(
            st.sampled_from(
                [
                    own,
                    own,
                    True,
                    {},
                    {"type": [own["type"], other["type"]]},
                    {"anyOf": [other, own]},
                    {"oneOf": [own, {"type": "null"}]} if value is not None else own,
                    {"$ref": f"#/$defs/{key}"},
                    {"enum": ["x", 1, None, value]},
                    {"const": value},
                    {"allOf": [own, {}]},
                    {**own, "nullable": True} if value is not None else {**other, "nullable": True},
                ]
            )
        )
    schema = {"type": "object", "properties": properties, "$defs": parts}
    if draw(st.booleans()) and len(arguments) == 1:
        [one] = properties.values()
        others = {"type": draw(st.sampled_from(["string", "integer"]))}
        by_pattern = {"patternProperties": {".*": one}, "additionalProperties": others}
        schema = {
            "type": "object",
            "$defs": parts,
            **draw(st.sampled_from([by_pattern, {"additionalProperties": one}])),
        }
    return arguments, schema


@cache
def reading(name: str) -> tuple[ChatRenderer, ReplyParser]:
    renderer = world(name).renderer
    return renderer, renderer.parser("auto")


def written(name: str, arguments: dict[str, Json], tool: Json) -> str:
    """What the family's model would write."""
    renderer, _ = reading(name)
    template, question = renderer.template([tool]), {"role": "user", "content": "u"}
    shown: Json = json.dumps(arguments) if template.arguments_as_text else arguments
    call = {"id": "c00000000", "type": "function", "function": {"name": "f", "arguments": shown}}
    turn: Json = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = template.render([question], [tool], renderer.options, generation_prompt=False)
    text = template.render([question, turn], [tool], renderer.options, generation_prompt=False).removeprefix(asked)
    text = text.removeprefix(template.opening(renderer.options).kept)
    end = renderer.ends(template).search(text)
    return renderer.structure.plain(text[: end.start()] if end else text)


@pytest.mark.parametrize("name", READING)
@given(call=calls())
def test_arguments_are_those_that_were_written_or_the_call_is_not_read(
    name: str, call: tuple[dict[str, Json], Json]
) -> None:
    arguments, schema = call
    assume(not any(SWALLOWED.search(json.dumps(value)) for value in arguments.values()))
    tool = {"type": "function", "function": {"name": "f", "description": "-", "parameters": schema}}
    text = written(name, arguments, tool)
    message = reading(name)[1](text, [tool])
    if "tool_calls" in message:
        assert called(message) == [("f", arguments)]
        assert json.dumps(called(message)[0][1]).count("true") == json.dumps(arguments).count("true")  # 1 == True
    else:
        assert "f" in message["content"]


ARGUMENTS: list[tuple[Json, Json]] = [
    (True, {"type": "boolean"}),
    (False, {"anyOf": [{"type": "boolean"}, {"type": "integer"}]}),
    (None, {"type": ["integer", "null"]}),
    (None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    ("True", {"type": "string"}),
    ("5", {"type": "string"}),
    ('"5"', {"type": "string"}),
    ("null", {"type": "string"}),
    (5, {"type": "integer"}),
    (1.0, {"type": "integer"}),
    (-1.5e300, {"type": "number"}),
    (10**30, {"type": "integer"}),
    ("b", {"enum": ["a", "b"]}),
    (2, {"enum": [1, 2]}),
    ("text", {"type": ["string", "null"]}),
    ("text", {"$ref": "#/$defs/kind"}),
    ("text", {}),
    ([1, "a", None, True], {"type": "array"}),
    ({"a": [False]}, {"type": "object"}),
    ("a</parameter>b", {"type": "string"}),
    ("a</tool_call>b", {"type": "string"}),
    ("</arg_value>", {"type": "string"}),
    ("\n two\nlines \n", {"type": "string"}),
    ("", {"type": "string"}),
]


@pytest.mark.parametrize("name", READING)
def test_what_can_be_read_is_read(name: str) -> None:
    for value, kind in ARGUMENTS:
        schema = {"type": "object", "properties": {"q": kind}, "$defs": {"kind": {"type": "string"}}}
        tool = {"type": "function", "function": {"name": "f", "description": "-", "parameters": schema}}
        text = written(name, {"q": value}, tool)
        assert called(reading(name)[1](text, [tool])) == [("f", {"q": value})], (value, kind, text)


@pytest.mark.parametrize(
    "kind", [{}, True, {"type": ["string", "integer"]}, {"anyOf": [{}, {}]}, {"$ref": "elsewhere"}]
)
def test_what_may_be_one_of_several_is_not_read(kind: Json) -> None:
    with pytest.raises(Ambiguous):
        value_of("5", kind, {})


TAGGED = [
    (qwen_xml, "<tool_call>\n<function=f>\n<parameter=q>\n{}\n</parameter>\n</function>\n</tool_call>"),
    (glm, "<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
]
UNDECLARED: list[Json] = [
    {"name": "g", "parameters": {"type": "object", "properties": {"q": {"type": "integer"}}}},  # another tool
    {"name": "f"},
    {"name": "f", "parameters": None},
    {"name": "f", "parameters": {}},
    {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    {"name": "f", "parameters": {"type": "object", "properties": {"r": {"type": "integer"}}}},
]


@pytest.mark.parametrize("value", ["5", "-1e9", "true", "None", "[1, 2]", '{"a": 1}', '"x"', "x"])
@pytest.mark.parametrize(("parse", "text"), TAGGED)
def test_a_value_without_a_declared_type_is_text(parse: ReplyParser, text: str, value: str) -> None:
    for function in UNDECLARED:
        message = parse(text.format(value), [{"type": "function", "function": function}])
        assert (called(message), message["content"]) == ([("f", {"q": value})], ""), function


@pytest.mark.parametrize(("parse", "text"), TAGGED)
def test_a_call_that_is_not_read_does_not_go_on_into_the_next(parse: ReplyParser, text: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"q": {}}}}}
    for one, other, expected in (("5", "6", []), ("5", "a", ["a"]), ("a", "5", ["a"])):
        message = parse(text.format(one) + "\n" + text.format(other), [tool])
        assert called(message) == [("f", {"q": value}) for value in expected]
        assert len(message["content"]) >= len(text.format("")) * (2 - len(expected))


def test_a_reference_to_itself_ends() -> None:
    assert value_of("x", {"$ref": "#/a"}, {"a": {"$ref": "#/a"}}) == "x"
    assert value_of("x", {"$ref": "#/a"}, {"a": {"allOf": [{"$ref": "#/a"}] * 9}}) == "x"


def test_every_format_is_one_of_the_families() -> None:
    assert {parser_name(reading(name)[1]) for name in READING} == {*(f"auto ({name})" for name in FORMATS), "harmony"}
