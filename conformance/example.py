"""A wrong trainer: it takes an attempt's last call for the whole conversation, and trains each reply where it stood."""

from typing import Any

import numpy as np

from conformance import reference
from conformance.check import Row

TRAINER, VERSION = "example", "0"
ADVANTAGES, REDUCTIONS = ("grpo_no_std",), ("token_mean",)


def rows(case: dict[str, Any], advantage: str, reduction: str) -> list[Row]:
    made = []
    for members in reference.by_group(case):
        mean = np.mean([attempt.reward for attempt in members])
        for attempt in members:
            steps = [step for step in attempt.steps if not step["discarded"]]
            ids = steps[-1]["prompt"] + steps[-1]["completion"]
            sampled = [(len(s["prompt"]) + t, s["logprobs"][t]) for s in steps for t, m in enumerate(s["mask"]) if m]
            trained = [at for at, _ in sampled if at < len(ids)]
            old = [logp for at, logp in sampled if at < len(ids)]
            made.append(Row(attempt.number, ids, trained, old, [attempt.reward - mean] * len(trained)))
    count = sum(len(row.trained) for row in made)
    return [row._replace(weight=[1 / count] * len(row.trained)) for row in made]


VARIANTS = {"": rows}
