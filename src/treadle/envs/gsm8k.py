"""GSM8K's word problems: rewards of replies, in one turn or over several, as in SkyRL.

    user       Weng earns $12 an hour for babysitting. Yesterday, she ... Let's think step by step and output the final
               answer after "####".
    assistant  Weng earns 12/60 = 0.2 a minute, and 0.2 x 50 = 10 for 50 minutes. #### 10

One turn needs no environment: `reward` grades a reply. Source: skyrl-gym 0.4.0, `gsm8k` and `gsm8k_multi_turn`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from treadle.core.errors import DataError
from treadle.core.metrics import Metric
from treadle.core.rewards import Reward
from treadle.core.types import Message, Task
from treadle.envs.base import Environment, EnvStep
from treadle.envs.tasks import check_positive

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MULTI_TURN_INSTRUCTION = 'Let\'s think step by step and output a tentative numeric answer after "####".'
"""End of the published prompts, after the question and a space."""

THINK_AGAIN = (
    "Please provide your step-by-step reasoning, "
    "and also include a tentative numeric answer at the end in the exact format: '#### ANSWER'."
)
ANSWER_NOW = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."

FORMAT_SHARE = 0.2
"""Reward of an attempt with an answer in each turn, none of them right."""

_NUMBER = re.compile(r"-?[0-9.,]+")
_ANSWER = re.compile(f"#### ({_NUMBER.pattern})")


def answer_of(text: str) -> str | None:
    """Return the first answer in a text, without its commas; None without one.

    >>> answer_of("She has 1,000 + 200 = 1,200 left. #### 1,200")
    '1200'
    """
    match = _ANSWER.search(text)
    return None if match is None else match[1].replace(",", "")


def reward(task: Task, text: str) -> float:
    """Return 1.0 if the reply's answer equals the task's, character by character, otherwise 0.0.

    The ground truth is the answer ("10"), or a worked solution that ends with it, as in the data set's column `answer`
    ("... #### 10"). Raises DataError for anything else, which no reply could equal.
    """
    return float(answer_of(text) == golden_answer(task))


def golden_answer(task: Task) -> str:
    """Return the answer in the task's ground truth, without its commas. Raises DataError without one."""
    truth = task.ground_truth
    if isinstance(truth, str):
        if (answer := answer_of(truth)) is not None:
            return answer
        if _NUMBER.fullmatch(truth):
            return truth.replace(",", "")
    raise DataError(
        f"task {task.task_id} of GSM8K: the ground truth is {truth!r:.100}; it must be a text, the answer ('10') or a "
        "solution that ends with it ('... #### 10'); correct data.columns.ground_truth"
    )


class Gsm8kMultiTurn(Environment):
    """Lets the model retry until its answer is right, at most `max_turns` times.

    A right answer is worth 1 (component `answer`) and ends the attempt; a wrong one is worth `FORMAT_SHARE` divided by
    `max_turns` (`format`), and no answer nothing. The model is not informed of errors: it is asked for its reasoning
    again, and in the last turn for the answer only.
    """

    metrics = (Metric("no_answer", level="step", aggregation="mean", unit="share", help="replies without an answer"),)

    def __init__(self, max_turns: int = 5) -> None:
        check_positive("max_turns", max_turns, whole=True)
        self.max_turns = max_turns

    async def reset(self, task: Task) -> Sequence[Message]:
        self._golden, self._turns = golden_answer(task), 0
        return task.prompt

    async def step(self, text: str) -> EnvStep:
        self._turns += 1
        answer, turns_left = answer_of(text), self.max_turns - self._turns
        info = {"no_answer": answer is None}
        if answer == self._golden:
            return EnvStep(reward=Reward({"answer": 1.0}), done=True, info=info)
        paid = Reward({} if answer is None else {"format": FORMAT_SHARE / self.max_turns})
        if turns_left == 0:
            return EnvStep(reward=paid, done=True, info=info)
        again = Message(role="user", content=THINK_AGAIN if turns_left > 1 else ANSWER_NOW)
        return EnvStep([again], paid, info=info)
