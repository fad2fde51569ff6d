"""An agent with the OpenAI SDK's tool calls, written as for any model."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from treadle.core.types import Task
from treadle.recipes.agents import questions


async def solve(task: Task, client: AsyncOpenAI) -> float:
    """Search until the model answers. Calls beyond `rollout.max_steps` are refused, which ends the attempt."""
    messages: list[Any] = [*task.prompt]
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[questions.TOOL])
        reply = answer.choices[0].message
        if not reply.tool_calls:
            return questions.grade(task, reply.content)
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            assert call.type == "function"
            page = questions.search(task, questions.read_arguments(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": page})
