"""An environment of several turns: each `step` grades a reply and answers with the next message, until it says `done`.

    python examples/multi_turn.py

A quiz of three questions, which of two digits is larger; a wrong answer ends it. Half a minute on a CPU.
"""

import random

from small import COMPARE, MODEL, SETTINGS, arguments, message, question

import treadle


class Quiz(treadle.Environment):
    """Each step has a reward of its own; their sum is the attempt's. What an attempt remembers is in attributes."""

    async def reset(self, task: treadle.Task) -> list[treadle.Message]:
        self.pairs = list(task.extras["pairs"])
        return [self.next_question()]

    def next_question(self) -> treadle.Message:
        self.pair = self.pairs.pop()
        return message("user", COMPARE.format(*self.pair))

    async def step(self, text: str) -> treadle.EnvStep:
        if text != f"<answer> {max(self.pair)}</answer>":
            return treadle.EnvStep(done=True)
        if not self.pairs:
            return treadle.EnvStep(reward=1.0, done=True)
        return treadle.EnvStep([self.next_question()], reward=1.0)


def quizzes(count: int, seed: int) -> list[treadle.Task]:
    """Return tasks of three pairs of digits each."""
    draw = random.Random(seed)
    return [
        question("A quiz.", seed + number, "", pairs=[draw.sample(range(10), 2) for _ in range(3)])
        for number in range(count)
    ]


if __name__ == "__main__":
    options = arguments(updates=20, run="multi-turn")
    summary = treadle.train(
        Quiz,
        quizzes(320, seed=0),
        held_out=quizzes(40, seed=1000),
        model=MODEL,
        run=options.run,
        settings={**SETTINGS, "orchestration.updates": options.updates, "evaluation.greedy_too": False},
    )
    first, *_, last = summary["evaluations"]
    print(f"held out, right answers of three: {first['reward_mean']:.2f} -> {last['reward_mean']:.2f}")
