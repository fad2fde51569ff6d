"""A die under a cup: an environment of two turns, its tasks, and demonstrations for a model without any skill."""

from __future__ import annotations

import random

import treadle

SIDES = range(1, 7)
QUESTION: treadle.Message = {"role": "user", "content": "What does the die show?"}


class Die(treadle.Environment):
    """Shows the die to an agent that replies `look`; any other reply is its answer, worth 1 if it is right."""

    async def step(self, text: str) -> treadle.EnvStep:
        if text == "look":
            return treadle.EnvStep([{"role": "tool", "content": self.task.ground_truth}])
        return treadle.EnvStep(reward=float(text == self.task.ground_truth), done=True)


def tasks(split: str, count: int) -> list[treadle.Task]:
    """Return the tasks of a split, `train` or `held_out`, for `data.train` and `data.held_out`."""
    draw = random.Random(split)
    return [treadle.Task(f"{split}-{i}", [QUESTION], ground_truth=str(draw.choice(SIDES))) for i in range(count)]


def demonstration(index: int, seed: int) -> list[treadle.Message]:
    """Return a conversation of an agent that looks half the time, and then answers correctly every other time.

    It shows the possible replies; RL finds out which are good. Only a model built from scratch needs this: with another
    one, remove `warm_start` from the recipe.
    """
    draw = random.Random(f"{seed} {index}")
    shown, answer = str(draw.choice(SIDES)), str(draw.choice(SIDES))
    if draw.random() < 0.5:
        return [QUESTION, {"role": "assistant", "content": answer}]
    look: treadle.Message = {"role": "assistant", "content": "look"}
    said = shown if draw.random() < 0.5 else answer
    return [QUESTION, look, {"role": "tool", "content": shown}, {"role": "assistant", "content": said}]
