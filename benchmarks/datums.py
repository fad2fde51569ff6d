"""`forward_backward` of a Tinker client's datums: a call that shares their prefixes, against one datum at a time.

Each datum has all turns before it, as multi-turn clients send them; prompts of 200 tokens, turns of 40 read and 40
sampled ones. Random weights and ids, one thread.

    python -m benchmarks.datums
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Table, cpu_seconds, make_parser, show
from benchmarks.packing import BUDGET, CPU_MODEL, SMALL_MODEL
from benchmarks.workloads import VOCABULARY
from treadle.models.config import ModelConfig
from treadle.models.loading import make_model
from treadle.tinker.data import AdamParams, Adapter, Datum
from treadle.tinker.learner import TrainedModel

_SHAPES = ((1, 8), (4, 8), (8, 8))  # turns, samples of one prompt


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    options = make_parser(__doc__, repeats=3).parse_args(arguments)
    torch.set_num_threads(1)
    shape: dict[str, Any] = dict(SMALL_MODEL if options.small else CPU_MODEL)
    config = ModelConfig(build=shape, tokenizer="demo")
    model = TrainedModel(make_model(config, VOCABULARY, seed=0), Adapter(16), 0, BUDGET, Path())
    rows = [_row(model, *sizes, options.repeats, 4 if options.small else 40) for sizes in _SHAPES]
    note = f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']}, medians of {options.repeats}"
    show(options.json, Table("datums", note, rows))


def _row(model: TrainedModel, turns: int, samples: int, repeats: int, tokens: int) -> dict[str, str | int | float]:
    data = _conversations(turns, samples, tokens)

    def together() -> None:
        model.forward(data, "importance_sampling", {}, backward=True)
        model.optim_step(AdamParams(0.0))

    def alone() -> None:
        for datum in data:
            model.forward([datum], "importance_sampling", {}, backward=True)
        model.optim_step(AdamParams(0.0))

    seconds = cpu_seconds({"together": together, "alone": alone}, repeats)
    return {
        "turns x samples": f"{turns} x {samples}",
        "tokens": sum(len(datum.ids) for datum in data),
        "alone s": seconds["alone"],
        "together s": seconds["together"],
        "share": seconds["together"] / seconds["alone"],
    }


def _conversations(turns: int, samples: int, tokens: int) -> list[Datum]:
    random = np.random.default_rng(0)
    prompt, data = random.integers(0, VOCABULARY, 5 * tokens), []
    for _ in range(samples):
        ids = prompt
        for _ in range(turns):
            ids = np.concatenate([ids, random.integers(0, VOCABULARY, 2 * tokens)])
            advantages = np.zeros(len(ids) - 1, np.float32)
            advantages[-tokens:] = random.normal()
            logprobs = np.full(len(ids) - 1, -np.log(VOCABULARY), np.float32)
            inputs: dict[str, Any] = {
                "target_tokens": ids[1:].astype(np.int64),
                "logprobs": logprobs,
                "advantages": advantages,
            }
            data.append(Datum(ids[:-1].astype(np.int32), inputs))
    return data


if __name__ == "__main__":
    main()
