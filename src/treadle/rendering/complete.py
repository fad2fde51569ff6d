"""Whether a chat template writes all of a conversation, tried out on one of the same shape.

Templates silently drop roles that they do not know: `developer` on Qwen, `tool` on Phi. What they drop depends on roles
and on which parts messages have, hardly on what these say, so each part is a word here:

    user "What time is it?"                     -->  user "zqz0cz"
    assistant, calls clock {"zone": "UTC"}      -->  assistant, calls zqz1k0z {"q": "zqz1a0z"}
    tool "12:00"                                -->  tool "zqz2cz"             which of these words are in the text?
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treadle.rendering.template import Plain

MessageShape = tuple[str, bool, bool, int, int]
"""Role, whether it has content, whether a thought, how many tool calls, and which call it answers (-1: none)."""
Shape = tuple[MessageShape, ...]


def shape(messages: Sequence[Mapping[str, Any]]) -> Shape:
    """Return the shape of a conversation; blank content counts as none."""
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
    """Make a conversation of that shape, each part of which is a word."""
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
            message["tool_call_id"] = _call_id(answers)
        messages.append(message)
    return messages


def left_out(shape: Shape, text: str) -> tuple[tuple[int, str], ...]:
    """Return the parts that are not in the text of `example`: (message, "content", "thought" or "tool call").

    Not among them are thoughts before the last question, which templates leave out on purpose.
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
    return {"id": _call_id(number), "type": "function", "function": function}


def _call_id(number: int) -> str:
    return f"zqz{number:06d}"  # nine letters and digits, which Mistral's templates want
