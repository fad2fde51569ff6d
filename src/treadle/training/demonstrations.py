"""Demonstrations for the supervised warm start: where they come from, and what calls they show. Needs no torch."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treadle.core.draws import permutation
from treadle.core.errors import ConfigError, DataError
from treadle.core.registry import resolve
from treadle.core.types import Ids, Message, as_messages
from treadle.rollout.chat import ChatRenderer

Demonstrations = Callable[[int], Sequence[Message]]


def load_demonstrations(source: str, options: dict[str, Any], seed: int) -> Demonstrations:
    """Conversation number i, for any i >= 0, from a .jsonl file (shuffled anew each pass) or a generator.

    A generator is `demonstration(index, seed, **options) -> messages`. Raises ConfigError or DataError.
    """
    if source.endswith(".jsonl"):
        return _from_file(Path(source), seed)
    generate = resolve("demonstrations", source)
    try:
        inspect.signature(generate).bind(0, seed, **options)
    except TypeError as error:
        raise ConfigError(f"warm_start.options {options} do not fit {source!r}: {error}") from error
    return lambda index: generate(index, seed, **options)


def _from_file(path: Path, seed: int) -> Demonstrations:
    if not path.is_file():
        raise ConfigError(f"warm_start.demonstrations: no file {str(path)!r}")
    rows: list[tuple[Message, ...]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict) or "messages" not in row:
            raise DataError(f"{path}:{number}: needs a 'messages' list")
        rows.append(as_messages(row["messages"], f"{path}:{number}"))
    if not rows:
        raise DataError(f"{path} has no demonstrations")
    return lambda index: rows[permutation(len(rows), seed, index // len(rows))[index % len(rows)]]


def demonstrated_calls(messages: Sequence[Message], renderer: ChatRenderer) -> list[tuple[Ids, Ids]]:
    """The (prompt ids, completion ids) of each assistant turn, rendered as a session would have recorded them.

    Raises DataError for a conversation without an assistant turn.
    """
    calls: list[tuple[Ids, Ids]] = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not calls:
            prompt = renderer.first(messages[:at])
        else:
            known = max(i for i in range(at) if messages[i]["role"] == "assistant")
            prompt = renderer.next(np.concatenate(calls[-1]), messages[:known], messages[known + 1 : at])
        calls.append((prompt, renderer.reply(message["content"])))
    if not calls:
        raise DataError(f"a demonstration has no assistant turn: {messages!r:.200}")
    return calls
