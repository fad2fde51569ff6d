"""Memory of one update of a large model on two ranks of this machine: PSS of both together, most of it at a time.

    .venv/bin/python benchmarks/rank_memory.py                 1.1 billion parameters, both precisions
    .venv/bin/python benchmarks/rank_memory.py --layers 2      a look at how it works

Random weights: figures depend on shapes alone. The process that starts the ranks holds no model and is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from treadle.benchmarks.meter import largest, pss_bytes
from treadle.benchmarks.report import machine
from treadle.benchmarks.scaling import trainer_spec
from treadle.benchmarks.workloads import CLASSIC, Size
from treadle.training.config import TrainingConfig
from treadle.training.rank_group import make_rank_trainer
from treadle.training.rank_processes import RankProcesses

RESULTS = Path(__file__).parent / "results" / "rank_memory.json"
MODEL = {  # the shape of TinyLlama
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SIZE = Size(tasks=2, attempts=2, turns=4)  # two trees of about 2,000 tokens


def measure(precision: str, layers: int, ranks: int) -> dict[str, Any]:
    """Return the figures of the second update, whose moments are there from the start."""
    training = TrainingConfig.model_validate(
        {"precision": precision, "gradient_checkpointing": True, "max_tokens_per_microbatch": 2048}  # one tree a rank
    )
    spec = trainer_spec({**MODEL, "num_hidden_layers": layers}, training, ranks)
    groups = CLASSIC["append-only"](SIZE)
    processes = RankProcesses(partial(make_rank_trainer, spec), ranks)
    try:
        facts = processes.call("facts")[0][0]
        processes.call("train_batch", groups)
        with largest(partial(_sum, processes.pids)) as most:
            started = time.perf_counter()
            [result] = processes.call("train_batch", groups)[0]
            seconds = time.perf_counter() - started
    finally:
        processes.close()
    return {
        "precision": precision,
        "ranks": ranks,
        "parameters": facts.parameters,
        "tokens": result.metrics["packed_tokens"],
        "pss_bytes": most[0],
        "of weights, gradients and moments": 16 * facts.parameters,
        "seconds": seconds,
    }


def _sum(pids: list[int]) -> list[int]:
    return [sum(pss_bytes(pids))]


def main() -> None:
    """Measure, print, and write `results/rank_memory.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", nargs="+", default=["bfloat16", "bfloat16_pure"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks follow
    rows = []
    for precision in options.precision:
        rows.append(measure(precision, options.layers, options.ranks))
        print(json.dumps(rows[-1]), flush=True)
    options.output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
