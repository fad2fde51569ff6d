"""`ReasoningGym`: one reply to an item of reasoning-gym, scored by the item's data set.

    system     ... provide the answer in the following format: <answer>answer here</answer> ...
    user       State the final answer to the following arithmetic problem: 4 + 3 =
    assistant  4 + 3 is 7. <answer>7</answer>                                                  1

Some scorers evaluate answers as Python expressions (`eval`, sympy's `parse_expr`), and `9**9**9` suffices to block a
process forever. They run in confined processes (`scoring_child`), each answer within its time limit.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reasoning_gym.utils import extract_answer

from treadle.core.errors import Cause, ConfigError, DataError, TrajectoryFailure
from treadle.core.metrics import Metric
from treadle.core.rewards import Reward
from treadle.core.types import Message, Task
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tasks import check_positive
from treadle.workers.confined import ChildPool, NoAnswer

ADDRESS_SPACE = 2**32
"""Address space of a scoring process, in bytes."""

_START = 120.0  # seconds to import the library, and to make a data set
_FORMAT = re.compile(
    r"\s*<think>(?:(?!<think>|<answer>).)*?</think>\s*<answer>(?:(?!<think>|<answer>).)*?</answer>", re.DOTALL
)
_BLOCK = re.compile(r"<(think|answer)>.*?</\1>", re.DOTALL)


_PROGRAM = str(Path(__file__).with_name("scoring_child.py"))
_PLACES = json.dumps([str(Path(place).absolute()) for place in sys.path])
_COMMAND = [sys.executable, "-I", "-S", _PROGRAM, str(ADDRESS_SPACE), _PLACES]

SCORERS = ChildPool("reasoning-gym's scorers", _COMMAND, min(8, max(2, os.cpu_count() or 1)), start_timeout=_START)
"""Shared by this process. A score takes milliseconds; several run concurrently, so that a slow one delays none."""


class ReasoningGym(Environment):
    """Plays one reply to a task of `reasoning_gym_tasks`. Its options are a recipe's `environment_options`.

    score_seconds: time limit of scoring an answer. format_reward: extra reward for exactly one `<think>` block followed
    by exactly one `<answer>` block, as in the library's own training scripts (there .2).

    The answer is the last `<answer>` block. It is worth 0 if the scorer raises or times out.
    """

    metrics = (
        Metric("no_answer", "step", "mean", "share", "replies without an answer"),
        Metric("unreadable_answer", "step", "mean", "share", "answers that the scorer failed on, or took too long for"),
    )

    def __init__(self, score_seconds: float = 10.0, format_reward: float = 0.0) -> None:
        check_positive("score_seconds", score_seconds)
        if isinstance(format_reward, bool) or not isinstance(format_reward, int | float) or format_reward < 0:
            raise ConfigError(f"format_reward must be a number >= 0, got {format_reward!r}")
        self._seconds, self._format_reward = score_seconds, format_reward

    def reset(self, task: Task) -> Sequence[Message]:
        """Return the task's prompt. Raises DataError for a task of another source."""
        if missing := [key for key in ("scored_by", "config", "metadata") if key not in task.extras]:
            raise DataError(
                f"task {task.task_id} of environment reasoning_gym has no {missing[0]!r} in its extras; make its tasks "
                "with the source reasoning_gym"
            )
        self.task = task
        SCORERS.start_spare()
        return task.prompt

    def step(self, text: str) -> EnvStep:
        answer = extract_answer(text)
        score = self._score(answer)
        rewards = {"score": score or 0.0}
        if self._format_reward:
            rewards["format"] = self._format_reward * is_well_formed(text)
        info = {"no_answer": answer is None, "unreadable_answer": score is None}
        return EnvStep(reward=Reward(rewards), done=True, info=info)

    def _score(self, answer: str | None) -> float | None:
        """Return the data set's score of the answer; None if there is none."""
        extras: Mapping[str, Any] = self.task.extras
        entry = {"question": self.task.prompt[-1]["content"], "answer": self.task.ground_truth}
        # keeps tuples, which JSON would turn into lists
        packed = pickle.dumps({**entry, "metadata": extras["metadata"]})
        request = {"answer": answer, "entry": base64.b64encode(packed).decode(), "seconds": self._seconds}
        scorer = {"dataset": extras["scored_by"], "config": extras["config"]}
        with SCORERS.lease() as child:
            if error := child.ask(scorer, _START).get("error"):
                raise TrajectoryFailure(Cause.ENVIRONMENT, f"the scorer of {extras['scored_by']!r}: {error}")
            try:
                score = child.ask(scorer | request, self._seconds).get("score")
            except NoAnswer:
                return None
        return None if score is None else float(score)


def is_well_formed(text: str) -> bool:
    """Return whether a reply begins with one `<think>` block and one `<answer>` block, and has no other.

    >>> is_well_formed("<think>4 + 3</think> <answer>7</answer>")
    True
    """
    match = _FORMAT.match(text)
    return match is not None and _BLOCK.search(text, match.end()) is None
