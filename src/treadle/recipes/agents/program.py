"""A program that answers one question: the task on standard input, the reward as the last line of its output.

It uses only HTTP, no SDK: anything that can post JSON to $OPENAI_BASE_URL can be trained.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from typing import Any

from treadle.core.types import Task
from treadle.recipes.agents import questions


def main() -> None:
    """Search until the model answers. Calls beyond `rollout.max_steps` are refused, which ends the program."""
    task = Task(**json.loads(sys.stdin.readline()))
    messages: list[Any] = [*task.prompt]
    while True:
        reply = _complete(messages)
        if not reply.get("tool_calls"):
            break
        messages.append(reply)
        for call in reply["tool_calls"]:
            page = questions.search(task, questions.read_arguments(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": page})
    print(json.dumps({"reward": questions.grade(task, reply["content"])}))


def _complete(messages: list[Any]) -> Any:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages, "tools": [questions.TOOL]}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


if __name__ == "__main__":
    main()
