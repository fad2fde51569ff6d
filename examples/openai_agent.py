"""An agent that exists already, written with OpenAI's SDK for a model behind an API, is trained as it is.

    python examples/openai_agent.py

Treadle gives it the client; `answer` below knows nothing of training. Half a minute on a CPU.
"""

import json
from typing import Any

from openai import AsyncOpenAI
from small import MODEL, PAGE, SETTINGS, arguments, question

import treadle

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look up a page.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


async def answer(client: AsyncOpenAI, messages: list[Any], page: str) -> str:
    """The agent: it answers a question with a search tool."""
    while True:
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        reply = completion.choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply.model_dump(exclude_none=True))
        for call in reply.tool_calls:
            assert call.type == "function"
            name = json.loads(call.function.arguments).get("name")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{name} {page}"})


async def solve(task: treadle.Task, client: AsyncOpenAI) -> float:
    """What is added for training: a reward at the end."""
    text = await answer(client, list(task.prompt), task.ground_truth)
    return float(text == f"<answer> {task.ground_truth}</answer>")


if __name__ == "__main__":
    options = arguments(updates=20, run="openai-agent")
    parser = {"rollout.reply_parser": "treadle.recipes.agents.questions:parse_reply"}  # how the small model calls tools
    summary = treadle.train(
        solve,
        [question(PAGE, number, number % 10) for number in range(160)],
        held_out=[question(PAGE, number, number % 10) for number in range(200, 240)],
        model=MODEL,
        run=options.run,
        settings={**SETTINGS, **parser, "orchestration.updates": options.updates},
    )
    print(f"held out: {summary['held_out_success_before']:.2f} -> {summary['held_out_success_after']:.2f}")
