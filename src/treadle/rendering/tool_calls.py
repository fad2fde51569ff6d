"""How models write tool calls: one reader for each format, from the text of a call to its name and arguments.

    json_call      {"name": "look", "arguments": {"who": "Anna"}}              in <tool_call> tags: Hermes, Qwen 2.5, 3
    xml_call       <function=look><parameter=who>Anna</parameter></function>   in <tool_call> tags: Qwen 3.5, Nemotron
    glm_call       look<arg_key>who</arg_key><arg_value>Anna</arg_value>       in <tool_call> tags: GLM 4.5

A call is read as it was written, or not at all: not where a value may be one of several (`values.py`), and not where
text is left that belongs to no value. What a value holds does not end it: `</parameter>` does where a parameter or the
end of the call follows. (A value that holds a whole parameter, line breaks included, cannot be told from that one.)
What stands in a thought, or in a call that cannot be read, calls nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from treadle.core.text import read_json
from treadle.core.types import FunctionCall, ToolCall
from treadle.rendering.values import Ambiguous, value_of

Tool = Mapping[str, Any]
"""A tool's JSON schema, as OpenAI's API has it: `{"type": "function", "function": {"name": ..., ...}}`."""

ReadCall = Callable[[str, Sequence[Tool]], ToolCall | None]
"""The text of a call, without the tags around it -> the call.

None if that is no whole call. Raises Ambiguous for one that can be read in several ways: more text is then no remedy.
"""

THOUGHT, THOUGHT_END = "<think>", "</think>"
THOUGHT_TAGS = (THOUGHT, THOUGHT_END), ("[THINK]", "[/THINK]")  # the latter are Mistral's
CALL, _CLOSE = "<tool_call>", "</tool_call>"
_BEGIN = re.compile(f"{CALL}|{THOUGHT}")
_EITHER = re.compile(f"{CALL}|{_CLOSE}")
_MAX_ENDS = 32  # closing tags that are tried for one call
_TAGS = "tool_call>", "function=", "parameter=", "arg_value>"
_PAIRS = tuple((f"<{name}", f"</{name.rstrip('=>')}>") for name in _TAGS)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_GLM = re.compile(r"\s*([^\s<]+)\s*(.*)", re.DOTALL)
_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)


def tagged(text: str, tools: Sequence[Tool], read: ReadCall) -> tuple[str, list[ToolCall]]:
    """Return the text without its tool calls, which stand in <tool_call> tags, and the calls.

    All of it stays text if closing tags are left over: then a value holds some, and was cut.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    at = 0
    while begin := _BEGIN.search(text, at):
        call = None
        if begin[0] == CALL:
            with suppress(Ambiguous):
                for end in _ends(text, begin.end()):
                    if call := read(text[begin.end() : end], tools):
                        break
        stop = end + len(_CLOSE) if call else _skipped(text, begin)
        kept.append(text[at : begin.start() if call else stop])
        calls += [call] if call else []
        at = stop
    rest = "".join([*kept, text[at:]])
    if calls and any(rest.count(close) > rest.count(begin) for begin, close in _PAIRS):
        return text, []
    return rest, calls


def _skipped(text: str, begin: re.Match[str]) -> int:
    """Return where a thought, or a call that cannot be read, ends; the end of the text if it is cut."""
    if begin[0] == THOUGHT:
        end = text.find(THOUGHT_END, begin.end())
        return end if end >= 0 else len(text)
    depth = 0
    for tag in _EITHER.finditer(text, begin.start()):
        depth += 1 if tag[0] == CALL else -1
        if depth == 0:
            return tag.end()
    return len(text)


def _ends(text: str, at: int) -> Iterator[int]:
    for _ in range(_MAX_ENDS):
        if (at := text.find(_CLOSE, at)) < 0:
            return
        yield at
        at += 1


def json_call(text: str, tools: Sequence[Tool]) -> ToolCall | None:
    """Read `{"name": ..., "arguments": {...}}`; Llama says `parameters`."""
    call = _json(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    others = call.keys() - {"name", "id", "type"}
    if len(others) > 1 or not others <= {"arguments", "parameters"}:
        return None
    arguments: Any = next((call[key] for key in others), {})
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return _made(call["name"], arguments) if isinstance(arguments, dict) else None


def xml_call(text: str, tools: Sequence[Tool]) -> ToolCall | None:
    """Read `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

    One line break on either side of a value is the format's; where values differ in them, one was cut.
    """
    match = _FUNCTION.fullmatch(text)
    pairs = _pairs(_PARAMETER, match[2]) if match else None
    if match is None or pairs is None:
        return None
    frames = {value == "\n" or (value[:1] == "\n", value[-1:] == "\n") for _, value in pairs}
    if len(frames) > 1:
        raise Ambiguous(f"where the values of {text:.100} end")
    return _typed(match[1], [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs], tools)


def glm_call(text: str, tools: Sequence[Tool]) -> ToolCall | None:
    """Read `NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each argument."""
    match = _GLM.fullmatch(text)
    pairs = _pairs(_ARGUMENT, match[2]) if match else None
    return None if match is None or pairs is None else _typed(match[1], pairs, tools)


def named_call(name: str, arguments: str) -> ToolCall | None:
    """Read the arguments of a call, as JSON."""
    value = _json(arguments)
    return _made(name, value) if isinstance(value, dict) else None


def _made(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id="", type="function", function=FunctionCall(name=name, arguments=text))


def _pairs(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """Return key and value of each argument.

    None if that is not all of the text, or a value contains a call that does not end in it. Raises Ambiguous for a
    repeated key.
    """
    if text.count(CALL) > text.count(_CLOSE):
        return None
    pairs: list[tuple[str, str]] = []
    at = 0
    while text[at:].strip():
        match = pattern.match(text, at)
        if match is None:
            return None
        pairs.append((match[1], match[2]))
        at = match.end()
    if len({key for key, _ in pairs}) < len(pairs):
        raise Ambiguous(f"one of the arguments {[key for key, _ in pairs]!r:.200} is given twice")
    return pairs


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> ToolCall | None:
    """Make a call with values of the types that the tool's schema allows. Raises Ambiguous."""
    functions = [tool.get("function", {}) for tool in tools]
    root = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    return _made(name, {key: value_of(text, _schema_of(key, root), root) for key, text in pairs})


def _schema_of(key: str, root: Any) -> Any:
    """Return the schema of an argument; without one, anything is allowed."""
    if not isinstance(root, Mapping):
        return True
    properties = root.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    others = root.get("additionalProperties", True)
    return True if others is False or root.get("patternProperties") else others


def _json(text: str) -> Any:
    """Read JSON; None for text that is none, or repeats a key."""
    try:
        return read_json(text, strict=False, unique=True)
    except ValueError:
        return None
