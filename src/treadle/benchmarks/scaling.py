"""One update by 1, 2 and 4 ranks: time, how well slots keep ranks busy, and memory of each rank.

Random weights and ids: the figures depend on shapes alone. Ranks are processes of this machine; more of them than it
has cores show what is lost, and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from treadle.algorithms.config import AlgorithmConfig
from treadle.benchmarks.meter import MIB, child_cpu_seconds, largest, pss_bytes
from treadle.benchmarks.packing import BUDGET, CPU_MODEL
from treadle.benchmarks.report import Report, Row
from treadle.benchmarks.workloads import VOCABULARY, WORKLOADS, Size
from treadle.core.trainer import UpdateResult
from treadle.core.types import Group
from treadle.models.config import ModelConfig
from treadle.training.config import LearnerPlacement, TrainerSpec, TrainingConfig
from treadle.training.rank_group import make_rank_trainer
from treadle.training.rank_processes import RankProcesses

_RANKS = (1, 2, 4)
_WORKLOADS = ("append-only", "thinking stripped", "sub-agent forks")
_SIZE = Size(tasks=4, attempts=4)


def measure(threads: int, repeats: int) -> Report:
    """Measure every workload with every number of ranks, each of which computes with `threads` threads."""
    torch.set_num_threads(threads)
    taken = {ranks: _measured(ranks, repeats) for ranks in _RANKS}
    rows: list[Row] = []
    for workload in _WORKLOADS:
        one = taken[1][workload]["s"]
        rows += [
            {"workload": workload, "ranks": ranks, **found[workload], "times one": one / found[workload]["s"]}
            for ranks, found in taken.items()
        ]
    note = (
        f"2 layers of hidden size {CPU_MODEL['hidden_size']}, {_SIZE.tasks} tasks x {_SIZE.attempts} attempts, tree "
        f"packing by group, micro-batches of {BUDGET} tokens, medians of {repeats}, {threads} thread(s) a rank; "
        "memory: most PSS while it updates"
    )
    return Report("scaling", note, rows)


def _measured(ranks: int, repeats: int) -> dict[str, dict[str, float]]:
    training = TrainingConfig(max_tokens_per_microbatch=BUDGET)
    spec = trainer_spec({**CPU_MODEL, "vocab_size": VOCABULARY}, training, ranks)
    processes = RankProcesses(partial(make_rank_trainer, spec), ranks)
    try:
        return {workload: _update(processes, WORKLOADS[workload](_SIZE), repeats) for workload in _WORKLOADS}
    finally:
        processes.close()


def trainer_spec(build: Mapping[str, Any], training: TrainingConfig, ranks: int) -> TrainerSpec:
    """Return a trainer of a model with random weights, spread over ranks of this machine."""
    return TrainerSpec(
        model=ModelConfig(build=dict(build), tokenizer="demo"),
        training=training,
        algorithm=AlgorithmConfig(),
        warm_start=None,
        updates=1000,
        max_staleness=0,
        seed=0,
        placement=LearnerPlacement(ranks=ranks),
        traced_groups=0.0,
    )


def _update(processes: RankProcesses, groups: Sequence[Group], repeats: int) -> dict[str, float]:
    result = _train(processes, groups)  # warms up
    seconds, cpu, memory = [], [], []
    for _ in range(repeats):
        before, started = child_cpu_seconds(processes.pids), time.perf_counter()
        with largest(partial(pss_bytes, processes.pids)) as most:
            _train(processes, groups)
        seconds.append(time.perf_counter() - started)
        cpu.append(child_cpu_seconds(processes.pids) - before)
        memory.append(max(most))
    return {
        "s": median(seconds),
        "CPU s": median(cpu),
        "slot balance": result.metrics.get("slot_balance") or 1.0,
        "padded passes": int(result.metrics.get("padded_passes") or 0),
        "MiB a rank": median(memory) / MIB,
    }


def _train(processes: RankProcesses, groups: Sequence[Group]) -> UpdateResult:
    [result] = processes.call("train_batch", groups)[0]
    found: UpdateResult = result
    return found
