"""Asynchronous training: attempts of other batches go on while the learner computes and while slow tools answer.

    python examples/asynchronous.py

A search takes up to a second here, as a real one would. The same run once waits for each batch, and once trains on
tokens that are up to two versions old; both learn, the second in less time. A minute on a CPU.
"""

import asyncio
import random
import time
from typing import Any

from small import MODEL, PAGE, SETTINGS, arguments, message, question

import treadle


class SlowLibrary(treadle.Environment):
    """Answers searches after a while. Other attempts go on meanwhile."""

    async def step(self, text: str) -> treadle.EnvStep:
        if text == "<search> page</search>":
            await asyncio.sleep(random.random())
            return treadle.EnvStep([message("tool", f"page {self.task.ground_truth}")])
        return treadle.EnvStep(reward=float(text == f"<answer> {self.task.ground_truth}</answer>"), done=True)


def train(run: str, updates: int, staleness: int) -> dict[str, Any]:
    """Return the summary of a run whose tokens may be `staleness` versions old when they are trained."""
    return treadle.train(
        SlowLibrary,
        [question(PAGE, number, number % 10) for number in range(320)],
        held_out=[question(PAGE, number, number % 10) for number in range(400, 440)],
        model=MODEL,
        run=run,
        settings={
            **SETTINGS,
            "orchestration.updates": updates,
            "orchestration.max_staleness": staleness,
            "evaluation.greedy_too": False,
        },
    )


if __name__ == "__main__":
    options = arguments(updates=20, run="asynchronous")
    for staleness in (0, 2):
        started = time.monotonic()
        summary = train(f"{options.run}-{staleness}", options.updates, staleness)
        before, after = summary["held_out_success_before"], summary["held_out_success_after"]
        print(f"max_staleness {staleness}: {before:.2f} -> {after:.2f} in {time.monotonic() - started:.0f} s")
