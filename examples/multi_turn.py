"""An environment of several turns: `step` answers each reply with an observation, until it says `done`.

    python examples/multi_turn.py

A digit is guessed in at most four turns, each answered by "more" or "less"; the sooner, the higher the reward.
A minute on a CPU.
"""

from small import GUESS, MODEL, SETTINGS, arguments, message, question

import treadle


class Guess(treadle.Environment):
    """Each guess but the right one is answered. What an attempt needs to remember is an attribute."""

    async def reset(self, task: treadle.Task) -> list[treadle.Message]:
        self.turns = 0
        self.digit = int(task.ground_truth)
        return list(task.prompt)

    async def step(self, text: str) -> treadle.EnvStep:
        self.turns += 1
        guess = text.removeprefix("<answer> ").removesuffix("</answer>")
        if not guess.isdecimal():
            return treadle.EnvStep(done=True, info={"guesses": self.turns})
        if int(guess) == self.digit:
            return treadle.EnvStep(reward=1.25 - self.turns / 4, done=True, info={"guesses": self.turns})
        return treadle.EnvStep([message("user", "more" if int(guess) < self.digit else "less")])


if __name__ == "__main__":
    options = arguments(updates=40, run="multi-turn")
    tasks = [question(GUESS, number, number % 10) for number in range(160)]
    summary = treadle.train(
        Guess,
        tasks,
        held_out=[question(GUESS, number, number % 10) for number in range(200, 240)],
        model=MODEL,
        run=options.run,
        settings={**SETTINGS, "orchestration.updates": options.updates, "evaluation.success_at": 0.25},
    )
    print(f"found in four guesses: {summary['held_out_success_before']:.2f} -> {summary['held_out_success_after']:.2f}")
