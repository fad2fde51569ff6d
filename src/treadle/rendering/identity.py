"""Records of calls, and equality of messages: by value, because clients send messages back in other forms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any

from treadle.core.images import PromptImage
from treadle.core.text import read_json
from treadle.core.types import BreakCause, Ids, Message

Value = tuple[str, str, str]
"""(role, content, tool calls as canonical JSON, or hashes of images): equal for equal messages."""


def flat(content: Any) -> str:
    """Join content to one string; None becomes ""."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in content)


def size(message: Mapping[str, Any]) -> int:
    """Estimate the characters of a message; images count as their data URLs."""
    content = message.get("content")
    texts = [content if isinstance(content, str) else flat(content), message.get("reasoning_content") or ""]
    texts += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return sum(map(len, [*texts, *(message.get("images") or ())]))


def value(message: Mapping[str, Any]) -> Value:
    """Return the value by which messages are compared.

    For assistants, it ignores outer white space, formatting of JSON arguments, ids of calls and reasoning.
    """
    content = flat(message.get("content"))
    if message["role"] != "assistant":
        return message["role"], content, " ".join(map(_image_key, message.get("images") or ()))
    calls = [
        [call["function"]["name"], _canonical(parsed(call["function"]["arguments"]))]
        for call in message.get("tool_calls") or ()
    ]
    return "assistant", content.strip(), json.dumps(calls, sort_keys=True) if calls else ""


@lru_cache(maxsize=1024)
def _image_key(url: str) -> str:
    return sha256(url.encode()).hexdigest()


def reasoning(message: Mapping[str, Any]) -> str:
    """Return the thought of an assistant message without outer white space; "" without one."""
    return flat(message.get("reasoning_content")).strip()


def call_ids(message: Mapping[str, Any]) -> frozenset[str]:
    """Return the ids of a message's tool calls."""
    return frozenset(call["id"] for call in message.get("tool_calls") or () if call.get("id"))


def parsed(arguments: Any) -> Any:
    """Return a tool call's arguments as a value; invalid JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return read_json(arguments, unique=True)
    except ValueError:
        return arguments


def common(a: Sequence[Value], b: Sequence[Value]) -> int:
    """Return the number of leading messages in common."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def agents_change(recorded: Sequence[Value], sent: Sequence[Value]) -> BreakCause | None:
    """Return how the agent changed a conversation that it continues; None for a fork or a shortened one.

    recorded: a call's messages and its reply. sent: messages of the new call, which do not begin with all of
    `recorded`. It is a fork if it contains none of the replies after the change.
    """
    at = common(recorded, sent)
    was, now = recorded[at:], sent[at:]
    first = {message: n for n, message in reversed([*enumerate(was)])}  # message -> its first position
    if len(now) > 1 and was and now[0][0] == was[0][0] == "assistant" and now[0] not in first:
        return BreakCause.HISTORY_EDITED  # the reply itself
    replies = (n for n, (role, content, calls) in enumerate(now) if role == "assistant" and (content or calls))
    carried = next((n for n in replies if now[n] in first), None)
    if carried is None:
        return None
    if now[0] in first:
        return BreakCause.TRUNCATED
    return BreakCause.SUMMARY if carried < first[now[carried]] else BreakCause.HISTORY_EDITED


def _canonical(value: Any) -> Any:
    """Write JSON data with 1 for 1.0 (but not for true)."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    return [_canonical(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The prompt of one call.

    ids int32[P]. messages: source of the prompt. break_cause: why it does not continue the ids of the call continued by
    its messages; None if it does, or continues none. rendering: None for raw prompts. images: in order of their places.
    """

    ids: Ids
    messages: tuple[Message, ...] = ()
    break_cause: BreakCause | None = None
    rendering: Rendering | None = None
    images: tuple[PromptImage, ...] = ()


Span = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Rendering:
    """Derivation of a prompt's ids.

    text: output of the template, with structural tokens by private names (`Structure.plain` undoes that). spans:
    (start, end in the text, start, end in the ids) of each recorded reply kept with its own ids; outside them, the ids
    encode the text.
    turn: index of the first id of the assistant's turn. head: its opening text, as far as later prompts repeat it.
    values, replies: value and recorded reply, if any, of each message. lost: why replies could not be kept. setting:
    tools and options. opened: text of the message that the turn continues, "" for a new one.
    """

    text: str
    spans: tuple[Span, ...]
    turn: int
    head: str
    values: tuple[Value, ...]
    replies: tuple[Record | None, ...]
    lost: Mapping[int, BreakCause]
    setting: str
    opened: str = ""

    @property
    def continues(self) -> Record | None:
        """Return the latest recorded reply that follows the same messages in the prompt as when it was sampled."""
        replies = reversed([*enumerate(self.replies)])
        return next((record for at, record in replies if record and record.answers(self.values, at)), None)


class Record:
    """A recorded call, with the message that the agent got for it.

    ids: prompt and completion. turn: ids of the assistant's turn, which begins with `head`. stop: the end token, if
    sampled. whole: whether the message contains everything sampled.
    """

    def __init__(self, ids: Ids, rendering: Rendering, message: Message, stop: str, whole: bool = True) -> None:
        self.ids, self.rendering, self.message, self.stop, self.whole = ids, rendering, message, stop, whole
        self.turn, self.head = ids[rendering.turn :], rendering.head
        self.value = value(message)
        self.thought = reasoning(message)
        self.call_ids = call_ids(message)
        _role, content, calls = self.value
        self.bare = bool(content) and not (calls or self.thought or rendering.opened)  # a new turn, content alone

    @cached_property
    def history(self) -> tuple[Value, ...]:
        """Values of the messages up to and including the reply."""
        return (*self.rendering.values, self.value)

    def opens(self, content: str) -> bool:
        """Return whether an assistant message with this content may continue the reply."""
        return not self.call_ids and content.startswith(self.message["content"])

    def begins(self, ids: Ids) -> bool:
        return len(ids) >= len(self.ids) and bool((ids[: len(self.ids)] == self.ids).all())

    def answers(self, values: tuple[Value, ...], end: int) -> bool:
        return len(self.rendering.values) == end and self.rendering.values == values[:end]
