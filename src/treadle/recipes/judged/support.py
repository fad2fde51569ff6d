"""One answer to a customer, rewarded by a judge with a rubric of three criteria.

user       The kettle that I ordered arrived broken.
assistant  I am sorry that your kettle broke. We will send you another one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from treadle.core.types import Message, Task
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tasks import opening, split_key, words
from treadle.judge import Criterion, Judge

SYSTEM = "You answer customers of a shop. Write one or two short sentences."
ITEMS = {
    "train": words(
        "kettle lamp chair backpack blender camera clock desk drill fan guitar hammer helmet jacket keyboard mirror "
        "monitor mug pillow printer"
    ),
    "held_out": words("radio rug scooter sofa speaker tent toaster umbrella vase watch"),
}
"""Split -> its items, disjoint."""

_PROBLEMS = (
    "arrived broken",
    "came two weeks late",
    "is missing a part",
    "has the wrong color",
    "makes a strange noise",
)
RUBRIC = (
    Criterion("sorry", "Does the agent apologize?", weight=0.3),
    Criterion("named", "Does the agent call what was ordered by its name?", weight=0.4),
    Criterion("brief", "How brief is the answer? 10: up to 15 words. 0: none, or 45 and more.", "number", weight=0.3),
)


@cache
def _judge(model: str, replies: str | None) -> Judge:
    """All attempts share one."""
    return Judge(model, RUBRIC, cache=replies)


class Support(Environment):
    """One reply to a customer, rewarded by the judge.

    judge: name of the judge under `models` of the recipe, or policy. cache: of the judge, see `Judge`.
    """

    def __init__(self, judge: str = "judge", cache: str | None = None) -> None:
        self._judge = _judge(judge, cache)

    async def reset(self, task: Task) -> Sequence[Message]:
        self._task = task
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        reward = await self._judge.grade(text, task=self._task.prompt[-1]["content"])
        return EnvStep(reward=reward, done=True)


def tasks(split: str, count: int, seed: int = 0) -> list[Task]:
    """Return the first `count` tasks of a split (`train` or `held_out`); held-out tasks ignore `seed`."""
    key = split_key(split, count, seed)
    draws = random.Random(f"support/{key}")
    written = [f"The {draws.choice(ITEMS[split])} that I ordered {draws.choice(_PROBLEMS)}." for _ in range(count)]
    return [Task(f"support-{key.replace('/', '-')}-{n:06d}", opening(SYSTEM, text)) for n, text in enumerate(written)]
