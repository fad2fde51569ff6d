"""The smallest useful environment: one question, one reply. Models learn it in seconds.

    user       What is 3 + 4?
    assistant  <answer> 7</answer>

Of the 100 sums of two digits, 80 are for training and 20 are held out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treadle.core.types import Message, Step, Task, Trajectory
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tasks import check_share, split_key

Pair = tuple[int, int]

_ANSWER = re.compile(r"<answer>([^<]*)</answer>")
_LARGEST_SUM = 18


def _split_pairs() -> dict[str, tuple[Pair, ...]]:
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random("arithmetic/split").shuffle(pairs)
    return {"train": tuple(sorted(pairs[:80])), "held_out": tuple(sorted(pairs[80:]))}


PAIRS: Mapping[str, tuple[Pair, ...]] = _split_pairs()
"""Split -> its pairs of digits, disjoint and the same for every seed: 80 for `train`, 20 for `held_out`."""


class Arithmetic(Environment):
    """Plays one sum: reward 1 for `<answer> 7</answer>` if the sum is 7; `info["ended"]` is right, wrong or format."""

    async def step(self, text: str) -> EnvStep:
        answer = _ANSWER.fullmatch(text)
        if answer is None:
            return EnvStep(done=True, info={"ended": "format"})
        right = answer[1].strip() == self.task.ground_truth
        return EnvStep(reward=float(right), done=True, info={"ended": "right" if right else "wrong"})


def tasks(split: str, count: int, seed: int = 0) -> list[Task]:
    """Return the first `count` tasks of a split (`train` or `held_out`), pass after pass over its pairs.

    Each pass is reshuffled, by `seed` for training; held-out tasks ignore `seed`. For example `tasks("train", 1)`:

        Task("arithmetic-train-0-000000", prompt=(<user>,), environment="arithmetic", ground_truth="7",
             extras={"a": 3, "b": 4})

    Raises DataError for another split, ConfigError for an impossible `count`.
    """
    key = split_key(split, count, seed)
    size = len(PAIRS[split])
    pairs: list[Pair] = []
    for number in range(-(-count // size)):
        pairs += random.Random(f"arithmetic/pass/{key}/{number}").sample(PAIRS[split], size)
    name = f"arithmetic-{key.replace('/', '-')}"
    return [
        Task(f"{name}-{i:06d}", (_question(a, b),), "arithmetic", str(a + b), {"a": a, "b": b})
        for i, (a, b) in enumerate(pairs[:count])
    ]


def demonstration(index: int, seed: int, expert: float = 0.3, told: float = 0.0) -> tuple[Message, ...]:
    """Return conversation number `index` of a supervised warm start, about a pair of the train split only.

    A share `expert` gives the sum, the others any number from 0 to 18 (one in nineteen of those is right, too). In a
    share `told`, the question comes with a number, which is the reply. All draws come from (seed, index). Raises
    ConfigError if a share lies outside [0, 1].
    """
    check_share("expert", expert)
    check_share("told", told)
    draws = random.Random(f"arithmetic/demonstration/{seed}/{index}")
    a, b = draws.choice(PAIRS["train"])
    answer = a + b if draws.random() < expert else draws.randint(0, _LARGEST_SUM)
    asked = [_question(a, b), _told(answer)] if draws.random() < told else [_question(a, b)]
    return *asked, Message(role="assistant", content=f"<answer> {answer}</answer>")


def with_answer(
    task: Task, trajectory: Trajectory, step: Step, siblings: Sequence[Trajectory], messages: Callable[..., Any]
) -> list[Message]:
    """Tell the teacher the answer (`algorithm.distillation.context`)."""
    return [*messages(step), _told(task.ground_truth)]


def _told(answer: object) -> Message:
    return Message(role="user", content=f"It is {answer}.")


def _question(a: int, b: int) -> Message:
    return Message(role="user", content=f"What is {a} + {b}?")
