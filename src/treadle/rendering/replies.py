"""Reply parsers: from what a model wrote to the assistant message that an agent reads.

A parser is a function `(text, tools) -> Message`, registered as an entry point of `treadle.reply_parsers` or named
`module:attribute`. It never raises: what it cannot read as a thought or a tool call stays content, as it was written.

    <think>Anna or Bob?</think>                                   reasoning_content "Anna or Bob?"
    I look it up.                                                 content           "I look it up."
    <tool_call>{"name": "look", "arguments": {"who": "Anna"}}</tool_call>      one tool call
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from treadle.core.errors import ConfigError
from treadle.core.registry import resolve
from treadle.core.types import FunctionCall, Message, ToolCall
from treadle.core.untrusted_json import read_json

Tool = Mapping[str, Any]
"""A tool's JSON schema, as OpenAI's API has it: `{"type": "function", "function": {"name": ..., ...}}`."""

ReplyParser = Callable[[str, Sequence[Tool]], Message]
"""What the model wrote -> the assistant message that the agent gets. Without tools, tool calls are content."""

AUTO = "auto"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_THOUGHT_END = "</think>"


def plain(text: str, tools: Sequence[Tool] = ()) -> Message:
    """Return all of the text as the message's content."""
    return Message(role="assistant", content=text)


def thinking(text: str, tools: Sequence[Tool] = ()) -> Message:
    """Return what stands before `</think>` as reasoning_content, the rest as content."""
    thought, content = _split_thought(text)
    return _message(thought, content, [])


def hermes(text: str, tools: Sequence[Tool] = ()) -> Message:
    """Read thoughts, and tool calls as JSON (Hermes, Qwen).

    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
    """
    return _with_calls(text, tools, _json_call)


def qwen_xml(text: str, tools: Sequence[Tool] = ()) -> Message:
    """Read thoughts, and tool calls as tags.

    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>...`: a value is text where the tool's schema
    says so or says nothing, and otherwise JSON if it can be read as such.
    """
    return _with_calls(text, tools, _xml_call)


def reply_parser(name: str, template: str = "", setting: str = "rollout.reply_parser") -> ReplyParser:
    """Return the parser of that name; `auto`: by how the chat template `template` writes tool calls and thoughts.

    setting: what chose the name, for errors. Raises ConfigError for a name that is not registered, or no function.
    """
    if name != AUTO:
        parser: ReplyParser = resolve("reply_parsers", name, setting)
        if not callable(parser):
            raise ConfigError(f"{setting}: {name!r} is of type {type(parser).__name__}, it must be a function")
        return parser
    if "<tool_call>" in template:
        return qwen_xml if "<function=" in template else hermes
    return thinking if _THOUGHT_END in template else plain


def parser_name(parser: ReplyParser) -> str:
    """Return what a parser is called in error messages."""
    return str(getattr(parser, "__qualname__", parser))


def _split_thought(text: str) -> tuple[str, str]:
    """(thought, rest). A generation prompt may have opened the thought already."""
    before, end, after = text.partition(_THOUGHT_END)
    opened = before.lstrip().startswith("<think>")
    if not end:
        return (before.lstrip().removeprefix("<think>").strip(), "") if opened else ("", text)
    thought = before.lstrip().removeprefix("<think>") if opened else before
    return thought.strip(), after.lstrip("\n")


def _with_calls(text: str, tools: Sequence[Tool], read: Callable[[str, Sequence[Tool]], ToolCall | None]) -> Message:
    thought, content = _split_thought(text)
    if not tools:
        return _message(thought, content, [])
    calls: list[ToolCall] = []
    kept: list[str] = []
    at = 0
    for match in _CALL.finditer(content):
        call = read(match[1], tools)
        if call is not None:
            calls.append(call)
            kept.append(content[at : match.start()])
            at = match.end()
    kept.append(content[at:])
    return _message(thought, "".join(kept).strip() if calls else content, calls)


def _message(thought: str, content: str, calls: list[ToolCall]) -> Message:
    message = Message(role="assistant", content=content)
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id="", type="function", function=FunctionCall(name=name, arguments=text))


def _json_call(text: str, tools: Sequence[Tool]) -> ToolCall | None:
    call = _json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return _call(call["name"], arguments) if isinstance(arguments, dict) else None


def _xml_call(text: str, tools: Sequence[Tool]) -> ToolCall | None:
    match = _FUNCTION.fullmatch(text)
    if match is None:
        return None
    name = match[1].strip()
    types = dict(_parameter_types(name, tools))
    values = {
        key.strip(): _value(_unframed(value), types.get(key.strip())) for key, value in _PARAMETER.findall(match[2])
    }
    return _call(name, values)


def _unframed(value: str) -> str:
    """Without the one line break that the format writes on either side."""
    return value.removeprefix("\n").removesuffix("\n")


def _value(text: str, kind: object) -> Any:
    if kind in (None, "string"):
        return text
    value = _json(text)
    return text if value is None and text.strip() != "null" else value


def _parameter_types(name: str, tools: Sequence[Tool]) -> Iterator[tuple[str, object]]:
    """(parameter, the type that its schema names) of the tool called `name`."""
    for tool in tools:
        function = tool.get("function", {})
        schema = function.get("parameters") if function.get("name") == name else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        for key, value in properties.items() if isinstance(properties, Mapping) else ():
            yield key, value.get("type", "any") if isinstance(value, Mapping) else None


def _json(text: str) -> Any:
    """The value, or None for what cannot be read."""
    try:
        return read_json(text, strict=False)
    except ValueError:
        return None
