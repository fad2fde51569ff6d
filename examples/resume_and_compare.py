"""A run is a directory: it goes on where it was, and runs are compared by what is in them.

    python examples/resume_and_compare.py

Trains half the updates, resumes for the other half, trains a second run with another advantage, and compares.
Half a minute on a CPU; Ctrl-C and `kill -9` at any time leave a run that resumes in the same way.
"""

import json
from pathlib import Path
from typing import Any

from small import MODEL, SETTINGS, arguments, comparisons

import treadle


def reward(task: treadle.Task, text: str) -> float:
    """Return 1 for the larger digit."""
    return float(text == f"<answer> {task.ground_truth}</answer>")


def train(run: Path, resume: bool = False, **settings: Any) -> None:
    """Make a run, or go on with one."""
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    treadle.train(reward, comparisons(), model=MODEL, run=run, settings={**SETTINGS, **changed}, resume=resume)


def rewards(run: Path) -> list[float]:
    """Return the mean reward of each update, from the run's metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["reward_mean"] for line in lines if line["kind"] == "update"]


if __name__ == "__main__":
    options = arguments(updates=20, run="grpo")
    other = options.run.with_name("rloo")
    train(options.run, orchestration__updates=options.updates // 2)
    train(options.run, resume=True, orchestration__updates=options.updates)
    train(other, orchestration__updates=options.updates, algorithm__advantage="rloo")
    for run in (options.run, other):
        curve = rewards(run)
        print(f"{run.name}: {len(curve)} updates, reward {curve[0]:.2f} -> {curve[-1]:.2f}")
    print(f"both in one picture: treadle plot {options.run} {other}")
