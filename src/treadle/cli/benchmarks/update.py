"""One optimizer update of the demo's shape: `step` against `chain` packing, at several micro-batch budgets."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from treadle.algorithms.config import AlgorithmConfig
from treadle.cli.benchmarks.report import Report, Row, cpu_seconds
from treadle.core.types import Group, SamplingParams, Status, Step, StopReason, Task, Trajectory
from treadle.orchestration.config import load_recipe
from treadle.packing.layout import Packing
from treadle.training.learner import Learner
from treadle.training.model import make_model

_VOCABULARY = 704


def recorded_groups(tasks: int = 32, group_size: int = 8) -> list[Group]:
    """Append-only trajectories of 1 to 4 steps, as the demo records them; random ids, rewards 0 and 1."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return rng.integers(3, _VOCABULARY, count).astype(np.int32)

    def trajectory(task: int, attempt: int, prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Trajectory:
        steps = []
        for _ in range(1 + int(rng.integers(4))):
            sampled = ids(5)
            logprobs, versions = np.full(5, -1.0, np.float32), np.zeros(5, np.int32)
            steps.append(Step(prompt, sampled, logprobs, versions, SamplingParams(max_tokens=12), StopReason.STOP))
            prompt = np.concatenate([prompt, sampled, ids(20)])
        name = f"g{task:06d}.{attempt}"
        return Trajectory(name, str(task), attempt, tuple(steps), float(rng.integers(2)), Status.DONE)

    groups = []
    for task in range(tasks):
        prompt = ids(28)
        trajectories = tuple(trajectory(task, attempt, prompt) for attempt in range(group_size))
        groups.append(Group(f"g{task:06d}", task, 0, task, Task(str(task)), trajectories))
    return groups


def measure(threads: int, repeats: int, tasks: int = 32) -> Report:
    """CPU seconds of forward, backward and optimizer step for the same recorded groups."""
    torch.set_num_threads(threads)
    groups = recorded_groups(tasks)
    learners = {(packing, budget): _learner(packing, budget) for budget in (2048, 8192) for packing in Packing}
    taken = cpu_seconds(
        {f"{packing} {budget}": partial(own.train_batch, groups) for (packing, budget), own in learners.items()},
        repeats,
    )
    rows: list[Row] = []
    for (packing, budget), learner in learners.items():
        seconds = taken[f"{packing} {budget}"]
        [result] = learner.train_batch(groups)
        rows.append(
            {
                "packing": str(packing),
                "micro-batch tokens": budget,
                "sequences": int(result.metrics["packed_sequences"]),
                "tokens computed": int(result.metrics["packed_tokens"]),
                "CPU s": seconds,
                "times step": taken[f"{Packing.STEP} {budget}"] / seconds,
            }
        )
    note = f"the demo's model and shape ({len(groups)} tasks x 8), median of {repeats}, {threads} thread(s)"
    return Report("update", note, rows)


def _learner(packing: Packing, budget: int) -> Learner:
    config = load_recipe("demo")
    training = config.training.model_copy(update={"packing": packing, "max_tokens_per_microbatch": budget})
    return Learner(make_model(config.model, _VOCABULARY, seed=0), training, AlgorithmConfig(), updates=1000)
