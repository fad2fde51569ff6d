"""The agent of `benchmarks.recipe_runs structured-output`: what a schema is worth to a model that has seldom seen JSON.

It asks which of two digits is larger and reads JSON. Demonstrations answer in a sentence, and in JSON one time in
a hundred; which digit they call larger is left to chance.
"""

from __future__ import annotations

import json
import random
from itertools import permutations
from typing import Any

import openai
from pydantic import BaseModel, ConfigDict, ValidationError

import treadle


class Comparison(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")
    larger: int
    smaller: int


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "comparison", "schema": Comparison.model_json_schema()}}
_IN_JSON = 0.01


async def solve(task: treadle.Task, client: openai.AsyncOpenAI) -> float:
    """Return 1 for JSON that is right. `structured`: whether the reply is sampled by the schema."""
    asked: Any = {"response_format": FORMAT} if task.extras["structured"] else {}
    answer = await client.chat.completions.create(model="policy", messages=list(task.prompt), **asked)  # type: ignore[arg-type]
    try:
        found = Comparison.model_validate_json(answer.choices[0].message.content or "")
    except ValidationError:
        return 0.0
    return float([found.larger, found.smaller] == task.ground_truth)


def tasks(split: str, structured: bool = True) -> list[treadle.Task]:
    """Return each pair of digits."""
    return [
        treadle.Task(
            f"{a}-{b}", [_question(a, b)], ground_truth=sorted((a, b), reverse=True), extras={"structured": structured}
        )
        for a, b in permutations(range(10), 2)
    ]


def demonstration(index: int, seed: int) -> list[treadle.Message]:
    """Return a question with somebody's answer."""
    draw = random.Random(f"{seed} {index}")
    a, b = draw.sample(range(10), 2)
    larger, smaller = draw.sample((a, b), 2)
    text = f"It is {larger}."
    if draw.random() < _IN_JSON:
        text = json.dumps({"larger": larger, "smaller": smaller})
    return [_question(a, b), treadle.Message(role="assistant", content=text)]


def _question(a: int, b: int) -> treadle.Message:
    return treadle.Message(role="user", content=f"Which is larger, {a} or {b}?")
