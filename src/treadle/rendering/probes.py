"""Probes of a chat template: does it write every part of a conversation, tools, and tool calls?

The first one uses an example conversation of the same shape.
Templates silently drop unknown roles: `developer` on Qwen, `tool` on Phi. What they drop depends on roles and on which
parts messages have, hardly on their text, so each part is a word here:

    user "What time is it?"                     -->  user "zqz0cz"
    assistant, calls clock {"zone": "UTC"}      -->  assistant, calls zqz1k0z {"q": "zqz1a0z"}
    tool "12:00"                                -->  tool "zqz2cz"             which of these words are in the text?
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treadle.core.errors import DataError
from treadle.rendering.template import ChatTemplate, Plain, Variables

_CALL_ID = "zqz{:06d}"  # nine letters and digits, as Mistral's templates require
MessageShape = tuple[str, bool, bool, int, int]
"""Role, whether it has content, whether a thought, how many tool calls, and which call it answers (-1: none)."""
Shape = tuple[MessageShape, ...]


def shape(messages: Sequence[Mapping[str, Any]]) -> Shape:
    """Return the shape of a conversation; blank content counts as missing."""
    calls = [call.get("id") for message in messages for call in message.get("tool_calls") or ()]
    numbers = {ident: number for number, ident in enumerate(calls) if ident}
    return tuple(
        (
            message["role"],
            bool(message["content"].strip()),
            bool((message.get("reasoning_content") or "").strip()),
            len(message.get("tool_calls") or ()),
            numbers.get(message.get("tool_call_id"), -1),
        )
        for message in messages
    )


def example(shape: Shape, arguments_as_text: bool) -> list[Plain]:
    """Make a conversation of that shape, with one word per part."""
    messages: list[Plain] = []
    number = 0
    for at, (role, content, thought, calls, answers) in enumerate(shape):
        message: Plain = {"role": role, "content": f"zqz{at}cz" if content else ""}
        if role == "assistant":
            message["reasoning_content"] = f"zqz{at}tz" if thought else ""
            if thought:
                message["thinking"] = message["reasoning_content"]
        if calls:
            message["tool_calls"] = [_call(at, n, number + n, arguments_as_text) for n in range(calls)]
            number += calls
        if answers >= 0:
            message["tool_call_id"] = _CALL_ID.format(answers)
        messages.append(message)
    return messages


def left_out(shape: Shape, text: str) -> tuple[tuple[int, str], ...]:
    """Return the parts of `example` missing from the text: (message, "content", "thought" or "tool call").

    Thoughts before the last question are not reported, as templates leave them out on purpose.
    """
    return tuple((at, part) for at, part, word in _words(shape) if word not in text)


def _words(shape: Shape) -> Iterator[tuple[int, str, str]]:
    question = max((at for at, (role, *_) in enumerate(shape) if role == "user"), default=-1)
    for at, (_, content, thought, calls, _) in enumerate(shape):
        if content:
            yield at, "content", f"zqz{at}cz"
        if thought and at > question:
            yield at, "thought", f"zqz{at}tz"
        for n in range(calls):
            yield at, "tool call", f"zqz{at}k{n}z"
            yield at, "tool call", f"zqz{at}a{n}z"


def _call(at: int, n: int, number: int, arguments_as_text: bool) -> Plain:
    arguments = {"q": f"zqz{at}a{n}z"}
    function = {"name": f"zqz{at}k{n}z", "arguments": json.dumps(arguments) if arguments_as_text else arguments}
    return {"id": _CALL_ID.format(number), "type": "function", "function": function}


_NAME = "find_zqz"
PROBE: Plain = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "-",
        "parameters": {"type": "object", "properties": {"zqz_key": {"type": "string"}}, "required": ["zqz_key"]},
    },
}
"""A tool that no caller has."""
_QUESTION: Plain = {"role": "user", "content": "u"}
_TALKS = [_QUESTION], [{"role": "system", "content": "s"}, _QUESTION]


def ignores_tools(template: ChatTemplate, options: Variables) -> bool:
    """Return whether the template accepts a tool but writes nothing of it. Refusing the tool is not ignoring it."""
    texts = [text for talk in _TALKS if (text := _rendered(template, talk, PROBE, options)) is not None]
    return bool(texts) and not any(_NAME in text for text in texts)


_BESIDE = {"title", "$schema", "$id", "$comment", "examples"}  # keys of a schema irrelevant for calling the tool
_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def unwritten_parts(template: ChatTemplate, tool: Plain, options: Variables) -> tuple[str, ...]:
    """Return the parts of a tool's description and schema that do not affect the template's output.

    Named like `who.$ref` or `where.items.enum`; an unwritten part is named without its children.
    """
    function = tool.get("function") or {}
    parameters, text = function.get("parameters"), _rendered(template, [_QUESTION], tool, options)
    if text is None or not isinstance(parameters, dict) or json.dumps(parameters, ensure_ascii=False) in text:
        return ()

    def is_lost(owner: Plain, key: str) -> bool:
        places = list(owner.items())
        value = owner.pop(key)
        same = _rendered(template, [_QUESTION], tool, options) == text
        owner.clear()
        owner.update(places)
        return same and value is not None

    def lost(schema: Any, path: str) -> Iterator[str]:
        if not isinstance(schema, dict):
            return
        for key, part in list(schema.items()):
            if (
                key in _BESIDE
                or part in (None, "", [], {})
                or (key == "additionalProperties" and part in (True, False))
            ):
                continue
            if key == "type" and part == "object" and schema.get("properties"):
                continue
            if key in ("properties", "patternProperties") and isinstance(part, dict):
                for name in list(part):
                    yield from [f"{path}{name}"] if is_lost(part, name) else lost(part[name], f"{path}{name}.")
            elif is_lost(schema, key):
                yield f"{path}{key}"
            elif key in _SCHEMAS:
                yield from lost(part, f"{path}{key}.")
            elif key in _LISTS and isinstance(part, list):
                for number, one in enumerate(part):
                    yield from lost(one, f"{path}{key}.{number}.")

    described = bool(function.get("description")) and is_lost(function, "description")
    return (*(["description"] if described else []), *lost(parameters, ""))


def probe_call(tool: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return a trial call of the tool: its name, and a text for each text argument."""
    schema = tool["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    kinds = properties.items() if isinstance(properties, Mapping) else ()
    texts = (key for key, kind in kinds if isinstance(kind, Mapping) and kind.get("type") == "string")
    return tool["function"]["name"], dict.fromkeys(texts, "zqz")


def written_call(template: ChatTemplate, tool: Plain, options: Variables) -> str | None:
    """Return the template's text of `probe_call` in the assistant's turn, from its head to its end.

    Structural tokens have private names. None if the template refuses the tool or the call; "" if it leaves the call
    out.
    """
    name, arguments = probe_call(tool)
    function = {"name": name, "arguments": json.dumps(arguments) if template.arguments_as_text else arguments}
    calls = [{"id": "c00000000", "type": "function", "function": function}]
    asked = _rendered(template, [_QUESTION], tool, options)
    text = _rendered(template, [_QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}], tool, options)
    if asked is None or text is None:
        return None
    turn = text.removeprefix(asked)
    return turn.removeprefix(template.opening(options).kept) if name in turn else ""


def _rendered(template: ChatTemplate, talk: list[Plain], tool: Plain, options: Variables) -> str | None:
    try:
        return template.render(talk, [tool], options, generation_prompt=False)
    except DataError:
        return None
