"""One update by several ranks of this machine: time, how well slots keep ranks busy, and memory.

Random weights and ids: the figures depend on shapes alone. More ranks than cores show what is lost, and nothing else.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --large              # memory of 1.1 billion parameters on two ranks, some minutes
    python -m benchmarks.scaling --large --layers 2   # a first look at it
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.measure import MIB, Row, Table, largest, make_parser, process_cpu_seconds, pss_bytes, show
from benchmarks.packing import BUDGET, CPU_MODEL, SMALL, SMALL_MODEL
from benchmarks.workloads import VOCABULARY, WORKLOADS, Size
from treadle.algorithms.config import AlgorithmConfig
from treadle.core.trainer import UpdateResult
from treadle.core.types import Group
from treadle.models.config import ModelConfig
from treadle.training.config import LearnerPlacement, TrainerSpec, TrainingConfig
from treadle.training.rank_group import make_rank_trainer
from treadle.training.rank_processes import RankProcesses

WORKLOAD_NAMES = ("append-only", "thinking stripped", "sub-agent forks")
SIZE = Size(tasks=4, attempts=4)
LARGE_MODEL = {  # the shape of TinyLlama
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LARGE_SIZE = Size(tasks=2, attempts=2, turns=4)  # two trees of about 2,000 tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = make_parser(__doc__, repeats=3, threads=True)
    parser.add_argument("--large", action="store_true", help="memory of a large model instead")
    parser.add_argument("--layers", type=int, default=22, help="of the large model (default: 22)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)  # the ranks follow
    if options.large:
        show(options.json, memory(options.layers))
        return
    build, size, counts = (SMALL_MODEL, SMALL, (1, 2)) if options.small else (CPU_MODEL, SIZE, (1, 2, 4))
    show(options.json, scaling({**build, "vocab_size": VOCABULARY}, size, counts, options.repeats))


def scaling(build: Mapping[str, Any], size: Size, counts: Sequence[int], repeats: int) -> Table:
    """Measure every workload with every number of ranks."""
    measured: dict[int, dict[str, dict[str, float]]] = {}
    for count in counts:
        with started(build, {"max_tokens_per_microbatch": BUDGET}, count) as ranks:
            measured[count] = {name: _update(ranks, WORKLOADS[name](size), repeats) for name in WORKLOAD_NAMES}
    rows: list[Row] = [
        {"workload": name, "ranks": count, **figures[name], "times one": measured[1][name]["s"] / figures[name]["s"]}
        for name in WORKLOAD_NAMES
        for count, figures in measured.items()
    ]
    note = (
        f"2 layers of hidden size {build['hidden_size']}, {size.tasks} tasks x {size.attempts} attempts, tree packing "
        f"by group, micro-batches of {BUDGET} tokens, medians of {repeats}, {torch.get_num_threads()} thread(s) a "
        "rank; memory: peak PSS of an update"
    )
    return Table("scaling", note, rows)


@contextmanager
def started(build: Mapping[str, Any], training: Mapping[str, Any], count: int) -> Iterator[RankProcesses]:
    """Start ranks on this machine that train a model with random weights."""
    spec = TrainerSpec(
        model=ModelConfig(build=dict(build), tokenizer="demo"),
        training=TrainingConfig.model_validate(training),
        algorithm=AlgorithmConfig(),
        warm_start=None,
        updates=1000,
        max_staleness=0,
        seed=0,
        placement=LearnerPlacement(ranks=count),
        traced_groups=0.0,
        longest_call=0,
    )
    ranks = RankProcesses(partial(make_rank_trainer, spec), count)
    try:
        yield ranks
    finally:
        ranks.close()


def _update(ranks: RankProcesses, groups: Sequence[Group], repeats: int) -> dict[str, float]:
    result = _train(ranks, groups)  # warms up
    pids = [place.pid for _, _, place in ranks.call("facts")]
    seconds, cpu, memory = [], [], []
    for _ in range(repeats):
        cpu_before, began = process_cpu_seconds(pids), time.perf_counter()
        with largest(partial(pss_bytes, pids)) as peaks:
            _train(ranks, groups)
        seconds.append(time.perf_counter() - began)
        cpu.append(process_cpu_seconds(pids) - cpu_before)
        memory.append(max(peaks))
    return {
        "s": median(seconds),
        "CPU s": median(cpu),
        "slot balance": result.metrics.get("slot_balance") or 1.0,
        "padded passes": int(result.metrics.get("padded_passes") or 0),
        "MiB a rank": median(memory) / MIB,
    }


def _train(ranks: RankProcesses, groups: Sequence[Group]) -> UpdateResult:
    [result] = ranks.call("train_batch", groups)[0]
    assert isinstance(result, UpdateResult)
    return result


def memory(layers: int, count: int = 2) -> Table:
    """Measure the PSS of all ranks together in the second update of a large model, in both precisions."""
    rows: list[Row] = []
    groups = WORKLOADS["append-only"](LARGE_SIZE)
    for precision in ("bfloat16", "bfloat16_pure"):
        training = {"precision": precision, "gradient_checkpointing": True, "max_tokens_per_microbatch": 2048}
        with started({**LARGE_MODEL, "num_hidden_layers": layers}, training, count) as ranks:
            facts = ranks.call("facts")
            parameters, pids = facts[0][0].parameters, [place.pid for _, _, place in facts]
            _train(ranks, groups)  # the optimizer's moments are there afterwards
            began = time.perf_counter()
            with largest(lambda pids=pids: [sum(pss_bytes(pids))]) as peak:  # type: ignore[misc]
                result = _train(ranks, groups)
            seconds = time.perf_counter() - began
        rows.append(
            {
                "precision": precision,
                "ranks": count,
                "parameters": parameters,
                "tokens": float(result.metrics["packed_tokens"] or 0),
                "GiB": peak[0] / 2**30,
                "weights, gradients, moments GiB": 16 * parameters / 2**30,
                "s": seconds,
            }
        )
    return Table("scaling: memory", "peak PSS of all ranks; the process that starts them holds no model", rows)


if __name__ == "__main__":
    main()
