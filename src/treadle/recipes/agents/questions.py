"""Shared by the three agents: the demo's questions, a search tool over each question's own world, and the demo model's
syntax of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.core.types import FunctionCall, Message, Task, ToolCall
from treadle.envs import lookup
from treadle.rendering.replies import Tool

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "The page of a person, a company or a city.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}

_CALL = re.compile(r"<search>([^<]*)</search>")
_ANSWER = re.compile(r"<answer>([^<]*)</answer>")


def tasks(split: str, count: int, seed: int = 0, hops: Sequence[int] = (1, 2, 3)) -> list[Task]:
    """Return the tasks of `lookup`, for whichever agent the recipe names."""
    return [replace(task, environment="") for task in lookup.tasks(split, count, seed, hops)]


def parse_reply(text: str, tools: Sequence[Tool] = ()) -> Message:
    """Parse a reply of the demo's model: `<search> Anna</search>` becomes a tool call in the form of the APIs."""
    call = _CALL.fullmatch(text)
    if call is None or not tools:
        return Message(role="assistant", content=text)
    function = FunctionCall(name="search", arguments=json.dumps({"name": call[1].strip()}))
    return Message(role="assistant", content="", tool_calls=[ToolCall(id="", type="function", function=function)])


def read_arguments(text: str) -> Any:
    """Return a tool call's arguments; None if the model did not write JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def search(task: Task, arguments: Any) -> str:
    """Return the tool's answer; never raises, whatever the model wrote as arguments."""
    name = arguments.get("name") if isinstance(arguments, dict) else None
    if not isinstance(name, str):
        return lookup.NOTHING
    return lookup.World(task.extras["world_seed"]).search(name.strip())


def grade(task: Task, text: str | None) -> float:
    """Return 1 for `<answer> lamps</answer>` if lamps are right, otherwise 0."""
    answer = _ANSWER.fullmatch(text or "")
    return float(answer is not None and answer[1].strip() == task.ground_truth)
