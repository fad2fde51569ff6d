"""The same agent with Anthropic's SDK: content blocks instead of messages, `tool_use` and `tool_result`."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic

from treadle.core.types import Task
from treadle.recipes.agents import questions

_FUNCTION = questions.TOOL["function"]
TOOL: Any = {
    "name": _FUNCTION["name"],
    "description": _FUNCTION["description"],
    "input_schema": _FUNCTION["parameters"],
}


async def solve(task: Task, client: AsyncAnthropic) -> float:
    """Search until the model answers. Calls beyond `rollout.max_steps` are refused, which ends the attempt."""
    system, question = task.prompt
    messages: list[Any] = [{"role": "user", "content": question["content"]}]
    while True:
        answer = await client.messages.create(
            model="policy", max_tokens=64, system=system["content"], messages=messages, tools=[TOOL]
        )
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return questions.grade(task, "".join(block.text for block in answer.content if block.type == "text"))
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": questions.search(task, call.input)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
