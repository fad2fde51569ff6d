"""Reply parsers: from what a model wrote to the assistant message that an agent reads.

A parser is a function `(text, tools) -> Message`, registered as an entry point of `treadle.reply_parsers` or named
`module:attribute`. It never raises: what it cannot read as a thought or a tool call stays content, as it was written.
Where the prompt has opened a thought, the text begins with that `<think>`.

    <think>Anna or Bob?</think>                                   reasoning_content "Anna or Bob?"
    I look it up.                                                 content           "I look it up."
    <tool_call>{"name": "look", "arguments": {"who": "Anna"}}</tool_call>      one tool call

Ours put thoughts and tool calls (`tool_calls.py`) together; `auto` chooses each by what the chat template writes
(`ChatRenderer.parser`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from treadle.core.errors import ConfigError
from treadle.core.registry import resolve
from treadle.core.types import Message, ToolCall
from treadle.rendering.tool_calls import CALL, THOUGHT_TAGS, Tool, glm_call, json_call, named_call, tagged, xml_call

ReplyParser = Callable[[str, Sequence[Tool]], Message]
"""What the model wrote -> the assistant message that the agent gets. Without tools, tool calls are content."""

AUTO = "auto"
_CHANNEL = re.compile(r"\s*(.*?)<\|channel\|>(\w+)([^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>(.*)", re.DOTALL)
_TURNS = re.compile(r"<\|end\|>(?:<\|start\|>assistant(?=[^<]*<\|channel\|>)|\Z)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")

ReadCalls = Callable[[str, Sequence[Tool]], tuple[str, list[ToolCall]]]
"""Text without thoughts -> what is left of it, and its tool calls."""


@dataclass(frozen=True)
class Parser:
    """Reads replies with tool calls in one format. name: in errors.

    thoughts: whether a thought is taken out of the content. Otherwise it stays, and is not searched for calls.
    tags: what opens and closes a thought.
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


def _llama(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """Read a call, if it is all of the text and of a known tool; other JSON is an answer."""
    call = json_call(text.strip().removeprefix("<|python_tag|>"), tools)
    names = {tool["function"]["name"] for tool in tools}
    return ("", [call]) if call and call["function"]["name"] in names else (text, [])


FORMATS: dict[str, ReadCalls] = {
    "hermes": partial(tagged, read=json_call),
    "qwen_xml": partial(tagged, read=xml_call),
    "glm": partial(tagged, read=glm_call),
    "llama": _llama,
}
"""Formats of tool calls, in the order in which `auto` tries them."""

plain = Parser("plain")
thinking = Parser("thinking", thoughts=True)
hermes = Parser("hermes", True, FORMATS["hermes"])
qwen_xml = Parser("qwen_xml", True, FORMATS["qwen_xml"])
glm = Parser("glm", True, FORMATS["glm"])
llama = Parser("llama", False, FORMATS["llama"])


def harmony(text: str, tools: Sequence[Tool] = ()) -> Message:
    """Read gpt-oss's channels: `analysis` is the thought, `commentary` to a function a tool call, `final` the content.

    Without tools, a call is content.
    """
    thoughts, contents, calls = [], [], []
    for part in _TURNS.split(text):
        match = _CHANNEL.fullmatch(part)
        recipient = _RECIPIENT.search(match[1] + match[3]) if match else None
        call = named_call(recipient[1], match[4]) if match and recipient and tools else None
        if call is not None:
            calls.append(call)
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
    """Return the parser of that name, which is not `auto`. Raises ConfigError for an unknown name, or no function.

    setting: what chose the name, for errors.
    """
    parser: ReplyParser = resolve("reply_parsers", name, setting)
    if not callable(parser):
        raise ConfigError(f"{setting}: {name!r} is of type {type(parser).__name__}, it must be a function")
    return parser


def parser_name(parser: ReplyParser) -> str:
    """Return what a parser is called in error messages."""
    return parser.name if isinstance(parser, Parser) else str(getattr(parser, "__qualname__", parser))


def _split_thought(text: str, unopened: bool, tags: tuple[str, str]) -> tuple[str, str, str]:
    """Return thought, text up to the thought's end, and rest; without a thought the rest is all.

    unopened: whether a thought may have no opening tag.
    """
    opening, closing = tags
    before, end, after = text.partition(closing)
    inner = before.lstrip()
    # Behind another tag, the end is none of a thought that the text begins with: in a call, it is an argument's.
    if not inner.startswith(opening) and (not unopened or not end or CALL in before or opening in before):
        return "", "", text
    rest = after.lstrip("\n")
    return inner.removeprefix(opening).strip(), text[: len(text) - len(rest)], rest
