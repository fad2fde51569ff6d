"""Reply parsers: from a model's text to the assistant message that an agent reads.

A parser is a function `(text, tools) -> Message`, registered as an entry point of `treadle.reply_parsers` or named
`module:attribute`. It never raises: text that is not readable as a thought or a tool call stays content, verbatim. If
the prompt has opened a thought, the text begins with that `<think>`.

    <think>Anna or Bob?</think>                                   reasoning_content "Anna or Bob?"
    I look it up.                                                 content           "I look it up."
    <tool_call>{"name": "look", "arguments": {"who": "Anna"}}</tool_call>      one tool call

Built-in parsers combine a thought format and a tool-call format; `auto` chooses both by probing the chat template
(`ChatRenderer.parser`). Each format has a reader, from a call's text to its name and arguments:

    json_call      {"name": "look", "arguments": {"who": "Anna"}}              in <tool_call> tags: Hermes, Qwen 2.5, 3
    xml_call       <function=look><parameter=who>Anna</parameter></function>   in <tool_call> tags: Qwen 3.5, Nemotron
    glm_call       look<arg_key>who</arg_key><arg_value>Anna</arg_value>       in <tool_call> tags: GLM 4.5

A call is read exactly as written, or not at all: it stays content if a declared value is ambiguous (`value_of`) or text
is left over. A `</parameter>` inside a value does not end it; one before another parameter or the end of the call does.
(A value that contains a whole parameter, including line breaks, is indistinguishable from that parameter.) Calls inside
thoughts, or inside an unreadable call, do not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from treadle.core.errors import ConfigError
from treadle.core.registry import resolve
from treadle.core.text import read_json
from treadle.core.types import FunctionCall, Message, ToolCall

Tool = Mapping[str, Any]
"""A tool's JSON schema, as in OpenAI's API: `{"type": "function", "function": {"name": ..., ...}}`."""

ReadCall = Callable[[str, Sequence[Tool]], ToolCall | None]
"""Parses the text of a call, without the tags around it.

None if it is incomplete. Raises Ambiguous for several readings, which more text would not resolve.
"""

THOUGHT, THOUGHT_END = "<think>", "</think>"
THOUGHT_TAGS = (THOUGHT, THOUGHT_END), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>")
"""Opening and closing tags of thoughts; the latter are Mistral's and Gemma's."""
CALL, CALL_END = "<tool_call>", "</tool_call>"
_BEGIN = re.compile(f"{CALL}|{THOUGHT}")
_EITHER = re.compile(f"{CALL}|{CALL_END}")
_CLOSES = re.compile(CALL_END)
_MAX_ENDS = 32  # closing tags to try per call
_TAGS = "tool_call>", "function=", "parameter=", "arg_value>"
_PAIRS = tuple((f"<{name}", f"</{name.rstrip('=>')}>") for name in _TAGS)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_GLM = re.compile(r"\s*([^\s<]+)\s*(.*)", re.DOTALL)
_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)


def tagged(text: str, tools: Sequence[Tool], read: ReadCall) -> tuple[str, list[ToolCall]]:
    """Split the text into content and the tool calls in its <tool_call> tags.

    All of it stays content if closing tags are left over: some were inside a value, which would be cut.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    at = 0
    while begin := _BEGIN.search(text, at):
        call = None
        if begin[0] == CALL:
            with suppress(Ambiguous):
                for close in islice(_CLOSES.finditer(text, begin.end()), _MAX_ENDS):
                    if call := read(text[begin.end() : close.start()], tools):
                        break
        stop = close.end() if call else _skipped(text, begin)
        kept.append(text[at : begin.start() if call else stop])
        calls += [call] if call else []
        at = stop
    rest = "".join([*kept, text[at:]])
    if calls and any(rest.count(close) > rest.count(begin) for begin, close in _PAIRS):
        return text, []
    return rest, calls


def _skipped(text: str, begin: re.Match[str]) -> int:
    """Return the end of a thought or an unreadable call; the end of the text if it is cut off."""
    if begin[0] == THOUGHT:
        end = text.find(THOUGHT_END, begin.end())
        return end if end >= 0 else len(text)
    depth = 0
    for tag in _EITHER.finditer(text, begin.start()):
        depth += 1 if tag[0] == CALL else -1
        if depth == 0:
            return tag.end()
    return len(text)


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
    return _tool_call(call["name"], arguments) if isinstance(arguments, dict) else None


def xml_call(text: str, tools: Sequence[Tool]) -> ToolCall | None:
    """Read `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

    One line break on either side of a value belongs to the format; if values differ in that, one was cut.
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


def _tool_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id="", type="function", function=FunctionCall(name=name, arguments=text))


def _pairs(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]] | None:
    """Return key and value of each argument.

    None if text is left over, or a value contains an incomplete call. Raises Ambiguous for a repeated key.
    """
    if text.count(CALL) > text.count(CALL_END):
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
    """Make a call with values of the types allowed by the tool's schema. Raises Ambiguous."""
    functions = [tool.get("function", {}) for tool in tools]
    root = next((function.get("parameters") for function in functions if function.get("name") == name), None)
    return _tool_call(name, {key: value_of(text, _schema_of(key, root), root) for key, text in pairs})


_TEXT = {"type": "string"}


def _schema_of(key: str, root: Any) -> Any:
    """Return the schema of an argument. Undeclared ones, or those of an unknown tool, count as text: the tool can
    then tell the model.
    """
    if not isinstance(root, Mapping):
        return _TEXT
    properties = root.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    if root.get("patternProperties"):
        return True
    others = root.get("additionalProperties", False)
    return _TEXT if others is False else others


def _json(text: str) -> Any:
    """Read JSON; None for invalid JSON or a repeated key."""
    try:
        return read_json(text, strict=False, unique=True)
    except ValueError:
        return None


_PYTHON = {"True": True, "False": False, "None": None}
_DEEPEST = 8  # levels of $ref, anyOf and so on, which may be recursive
_OF_TYPE: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "integer": (int,),
    "number": (int, float),
}


class Ambiguous(ValueError):
    """Raised for text with several possible values."""


def value_of(text: str, schema: Any, root: Any) -> Any:
    """Return the value of an argument from untyped text, according to the schema.

    Tag formats write `5` for the number and for the text, and templates write `true` as JSON or as Python does. The
    text is read in each way; readings that the schema does not allow are discarded:

        5    {"type": "integer"}             -> 5
        5    {"type": "string"}              -> "5"
        5    {"type": ["string", "integer"]} -> Ambiguous: a tool must never get an unintended value

    If the schema allows none, the text is read as JSON if valid, otherwise as text. root: schema of all arguments, for
    references.
    """
    readings = list(_readings(text))
    allowed = [reading for reading in readings if _allows(schema, reading, root)]
    if len(allowed) > 1:
        raise Ambiguous(f"{text:.40} may be one of {allowed!r:.200}")
    return (allowed or readings[1:] or readings)[0]


def _readings(text: str) -> Iterator[Any]:
    yield text
    if text.strip() in _PYTHON:
        yield _PYTHON[text.strip()]
        return
    try:
        value = read_json(text, strict=False, unique=True)
    except ValueError:
        return
    # Texts are written verbatim, never as JSON.
    if not isinstance(value, str):
        yield value


def _allows(schema: Any, value: Any, root: Any, depth: int = 0) -> bool:
    """Return whether a schema allows a value, by types, enums, references and combinations; ignores other keywords."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return schema is not False
    if value is None and schema.get("nullable") is True:  # OpenAPI's
        return True
    if "$ref" in schema and not _allows(_resolve(schema["$ref"], root), value, root, depth + 1):
        return False
    types = schema.get("type")
    names = [types] if isinstance(types, str) else types if isinstance(types, Sequence) else []
    if names and not any(_has_type(value, name) for name in names):
        return False
    if isinstance(schema.get("enum"), list) and not any(_equal(value, one) for one in schema["enum"]):
        return False
    if "const" in schema and not _equal(value, schema["const"]):
        return False
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and not enough(_allows(part, value, root, depth + 1) for part in parts):
            return False
    return True


def _has_type(value: object, name: object) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _OF_TYPE.get(name, ()) if isinstance(name, str) else ())


def _equal(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0, but not true."""
    return isinstance(a, bool) is isinstance(b, bool) and bool(a == b)


def _resolve(reference: Any, root: Any) -> Any:
    """Resolve `#/$defs/name`; a dangling reference allows anything."""
    path, schema = str(reference), root
    for step in path.removeprefix("#").strip("/").split("/") if path.startswith("#") else ["?"]:
        schema = schema.get(step.replace("~1", "/").replace("~0", "~"), True) if isinstance(schema, Mapping) else True
    return schema


ReplyParser = Callable[[str, Sequence[Tool]], Message]
"""Parses a model's text to the assistant message for the agent. Without tools, tool calls are content."""

AUTO = "auto"
_CHANNEL = re.compile(r"\s*(.*?)<\|channel\|>(\w+)([^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>(.*)", re.DOTALL)
_TURNS = re.compile(r"<\|end\|>(?:<\|start\|>assistant(?=[^<]*<\|channel\|>)|\Z)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")

ReadCalls = Callable[[str, Sequence[Tool]], tuple[str, list[ToolCall]]]
"""Splits text without thoughts into remaining text and tool calls."""


@dataclass(frozen=True)
class Parser:
    """Parses replies with one format of tool calls. name: for errors.

    thoughts: whether thoughts are taken out of the content. Otherwise they stay, and are not searched for calls.
    tags: opening and closing tag of a thought.
    """

    name: str
    thoughts: bool = False
    calls: ReadCalls | None = None
    tags: tuple[str, str] = THOUGHT_TAGS[0]

    def __call__(self, text: str, tools: Sequence[Tool] = ()) -> Message:
        if self.calls is None and not self.thoughts:
            return Message(role="assistant", content=text)
        thought, before, content = _split_thought(text, self.thoughts, self.tags)
        kept, calls = self.calls(content, tools) if self.calls is not None and tools else (content, [])
        if not self.thoughts:
            kept = before + kept
        message = Message(role="assistant", content=kept.strip() if calls else kept)
        if thought and self.thoughts:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return message


def llama_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """Read a call if it is the whole text and names a known tool; other JSON is an answer."""
    call = json_call(text.strip().removeprefix("<|python_tag|>"), tools)
    names = {tool["function"]["name"] for tool in tools}
    return ("", [call]) if call and call["function"]["name"] in names else (text, [])


FORMATS: dict[str, ReadCalls] = {
    "hermes": partial(tagged, read=json_call),
    "qwen_xml": partial(tagged, read=xml_call),
    "glm": partial(tagged, read=glm_call),
    "llama": llama_calls,
}
"""Formats of tool calls, in the order tried by `auto`."""

plain = Parser("plain")
thinking = Parser("thinking", thoughts=True)
hermes = Parser("hermes", True, FORMATS["hermes"])
qwen_xml = Parser("qwen_xml", True, FORMATS["qwen_xml"])
glm = Parser("glm", True, FORMATS["glm"])
llama = Parser("llama", False, FORMATS["llama"])


def harmony(text: str, tools: Sequence[Tool] = ()) -> Message:
    """Parse gpt-oss's channels: `analysis` is the thought, `commentary` to a function a tool call, `final` the content.

    Without tools, a call is content.
    """
    thoughts, contents, calls = [], [], []
    for part in _TURNS.split(text):
        match = _CHANNEL.fullmatch(part)
        recipient = _RECIPIENT.search(match[1] + match[3]) if match else None
        arguments = _json(match[4]) if match and recipient and tools else None
        if recipient and isinstance(arguments, dict):
            calls.append(_tool_call(recipient[1], arguments))
        elif match and not recipient and match[2] == "analysis":
            thoughts.append(match[4])
        else:
            contents.append(match[4] if match and not recipient else part)
    message = Message(role="assistant", content="".join(contents))
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def reply_parser(name: str, setting: str = "rollout.reply_parser") -> ReplyParser:
    """Return the parser of that name, except `auto`. Raises ConfigError for an unknown name, or no function.

    setting: name of the option that chose it, for errors.
    """
    parser: ReplyParser = resolve("reply_parsers", name, setting)
    if not callable(parser):
        raise ConfigError(f"{setting}: {name!r} is of type {type(parser).__name__}, it must be a function")
    return parser


def parser_name(parser: ReplyParser) -> str:
    return parser.name if isinstance(parser, Parser) else str(getattr(parser, "__qualname__", parser))


def _split_thought(text: str, unopened: bool, tags: tuple[str, str]) -> tuple[str, str, str]:
    """Return thought, text up to the thought's end, and rest; without a thought, everything is rest.

    unopened: whether a thought may have no opening tag.
    """
    opening, closing = tags
    before, end, after = text.partition(closing)
    inner = before.lstrip()
    # After another tag, a closing tag does not end an initial thought: within a call, it belongs to an argument.
    if not inner.startswith(opening) and (not unopened or not end or CALL in before or opening in before):
        return "", "", text
    rest = after.lstrip("\n")
    return inner.removeprefix(opening).strip(), text[: len(text) - len(rest)], rest
