"""The least there is: a function that grades one reply, tasks, and a model.

    python examples/bare_reward.py

A model learns which of two digits is larger; half a minute on a CPU.
"""

from small import MODEL, SETTINGS, arguments, comparisons

import treadle


def reward(task: treadle.Task, text: str) -> float:
    """Return 1 for the larger digit."""
    return float(text == f"<answer> {task.ground_truth}</answer>")


if __name__ == "__main__":
    options = arguments(updates=20, run="bare-reward")
    tasks = comparisons()
    summary = treadle.train(
        reward,
        [task for number, task in enumerate(tasks) if number % 4],
        held_out=tasks[::4],
        model=MODEL,
        run=options.run,
        settings={**SETTINGS, "orchestration.updates": options.updates},
    )
    print(f"held out: {summary['held_out_success_before']:.2f} -> {summary['held_out_success_after']:.2f}")
