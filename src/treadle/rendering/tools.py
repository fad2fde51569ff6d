"""Whether a chat template tells the model of tools, and how it writes a call of one: tried out before it matters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from treadle.core.errors import DataError
from treadle.rendering.template import ChatTemplate, Plain, Variables

_NAME = "find_zqz"
PROBE: Plain = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "-",
        "parameters": {"type": "object", "properties": {"zqz_key": {"type": "string"}}, "required": ["zqz_key"]},
    },
}
"""A tool that nobody has."""
_QUESTION: Plain = {"role": "user", "content": "u"}
_TALKS = [_QUESTION], [{"role": "system", "content": "s"}, _QUESTION]


def ignores_tools(template: ChatTemplate, options: Variables) -> bool:
    """Whether the template takes a tool and writes nothing of it. One that refuses the tool does not ignore it."""
    texts = [text for talk in _TALKS if (text := _rendered(template, talk, PROBE, options)) is not None]
    return bool(texts) and not any(_NAME in text for text in texts)


def probe_call(tool: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return a call of the tool to try out: its name, and a text for each argument that is one."""
    schema = tool["function"].get("parameters")
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    kinds = properties.items() if isinstance(properties, Mapping) else ()
    texts = (key for key, kind in kinds if isinstance(kind, Mapping) and kind.get("type") == "string")
    return tool["function"]["name"], dict.fromkeys(texts, "zqz")


def written_call(template: ChatTemplate, tool: Plain, options: Variables) -> str | None:
    """Return how the template writes `probe_call` in the assistant's turn, from its head to its end.

    Structural tokens stand by private names. None if the template refuses the tool or the call; "" if it leaves the
    call out.
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
