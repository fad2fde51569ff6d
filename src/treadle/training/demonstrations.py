"""Demonstrations for the supervised warm start: their sources, and the calls they show. Needs no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from treadle.core.draws import Stream, permutation
from treadle.core.errors import ConfigError, DataError
from treadle.core.registry import resolve
from treadle.core.text import json_problem
from treadle.core.trainer import ConversationCall
from treadle.core.types import Message, as_messages
from treadle.data.rows import parse_json
from treadle.rendering.chat import ChatRenderer
from treadle.rendering.conversation import Conversation
from treadle.rendering.identity import parsed
from treadle.rendering.replies import Tool

T = TypeVar("T")


class Demonstration(NamedTuple):
    """A conversation to learn, and the tools its replies may call, as JSON schemas."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()


Demonstrations = Callable[[int], Demonstration]


def load_demonstrations(source: str, options: dict[str, Any], seed: int) -> Demonstrations:
    """Return conversation number i >= 0 as a function of i, from a .jsonl file (reshuffled each pass) or a generator.

    A generator is `demonstration(index, seed, **options)` and returns messages or, like a row of such a file,
    `{"messages": [...], "tools": [...]}`. Raises ConfigError or DataError.
    """
    if source.endswith(".jsonl"):
        return _from_file(Path(source), seed)
    generate = resolve("demonstrations", source, "warm_start.demonstrations")
    try:
        inspect.signature(generate).bind(0, seed, **options)
    except TypeError as error:
        raise ConfigError(f"warm_start.options {options} do not fit {source!r}: {error}") from error
    return lambda index: checked_demonstration(generate(index, seed, **options), f"{source}, demonstration {index}")


def _from_file(path: Path, seed: int) -> Demonstrations:
    if not path.is_file():
        raise ConfigError(f"warm_start.demonstrations: no file {str(path)!r} (it is relative to {Path.cwd()})")
    # Splits bytes, not text: JSON strings may contain characters that str.splitlines treats as line ends.
    lines = enumerate(path.read_bytes().split(b"\n"), 1)
    rows = [_conversation(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not rows:
        raise DataError(f'{path} has no demonstrations; write {{"messages": [...]}} a line')
    return reshuffled(rows, seed)


def reshuffled(rows: Sequence[T], seed: int) -> Callable[[int], T]:
    """Return row number i >= 0 as a function of i: all rows repeatedly, each pass reshuffled."""
    shuffle = lru_cache(maxsize=1)(partial(permutation, len(rows), seed, stream=Stream.DEMONSTRATE))
    return lambda index: rows[shuffle(index // len(rows))[index % len(rows)]]


def _conversation(line: bytes, where: str) -> Demonstration:
    row = parse_json(line, where)
    return checked_demonstration(row if isinstance(row, dict) else {}, where)


def checked_demonstration(row: Mapping[str, Any] | Sequence[Message], where: str) -> Demonstration:
    """Return a demonstration from plain data, or from messages only. Raises DataError, prefixed by `where`."""
    row = row if isinstance(row, Mapping) else {"messages": row}
    if not isinstance(row.get("messages"), list | tuple):
        raise DataError(
            f"{where}: needs a 'messages' list, got {row.get('messages')!r:.80}; write objects, not JSON text"
        )
    tools = row.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: 'tools' must be a list of JSON schemas, got {tools!r:.100}")
    if problem := json_problem({"tools": tools}):
        raise DataError(f"{where}: {problem}")
    messages = as_messages(row["messages"], where)
    if fault := _fault(messages):
        raise DataError(f"{where}: {fault}")
    return Demonstration(messages, tuple(tools))


def _fault(messages: Sequence[Message]) -> str | None:
    """Return why no session could have recorded this conversation; None if one could."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        return "there is no assistant turn to learn"
    if roles[0] == "assistant" or ("assistant", "assistant") in pairwise(roles):
        return "an assistant turn needs a message of another role before it"
    calls = (call["function"] for message in messages for call in message.get("tool_calls", ()))
    wrong = next((call for call in calls if not isinstance(parsed(call["arguments"]), dict)), None)
    if wrong:
        return f"the arguments of a call of {wrong['name']!r} are not a JSON object: {wrong['arguments']!r:.100}"
    return None


def demonstrated_calls(
    messages: Sequence[Message], renderer: ChatRenderer, tools: Sequence[Tool] = ()
) -> list[ConversationCall]:
    """Return prompt, completion and images of each assistant turn, rendered as if recorded by a session.

    Raises DataError for a conversation without an assistant turn, or with one that answers nothing, and if the chat
    template refuses or leaves out a part.
    """
    if fault := _fault(messages):
        raise DataError(f"a demonstration cannot be learned: {fault}: {messages!r:.200}")
    conversation, calls = Conversation(renderer), list[ConversationCall]()
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = conversation.render(messages[:at], tools)
        completion = conversation.demonstrated(messages[: at + 1], tools)
        conversation.record(prompt, completion, message)
        calls.append((prompt.ids, completion, *prompt.images))
    return calls
