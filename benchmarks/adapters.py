"""Adapters beside full weights: what they cost Treadle's engine, and publication to a vLLM server without its proof.

SmolLM2 on vLLM's CPU build; first `treadle models get smollm2` and `make vllm-env`. Its LoRA kernels are not the GPU's.
The engine's CPU time is that of its passes alone, on one thread: 16 sequences of 200 tokens, then 16 tokens each.

    python -m benchmarks.adapters
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Table, make_parser, show
from treadle.core.config import build
from treadle.engines.compute import Compute
from treadle.engines.config import EngineConfig
from treadle.engines.torch.kv_cache import KVCache
from treadle.engines.torch.model import CachedModel
from treadle.engines.vllm.adapters import Exported
from treadle.engines.vllm.engine import open_engine
from treadle.engines.vllm.launch import ServerProcess
from treadle.models.config import LoraConfig, ModelConfig
from treadle.models.model_files import base_directory
from treadle.training.make import load_model
from treadle.training.trainer import EmbeddedSource

_RANKS = (None, 8, 16, 32)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    options = make_parser(__doc__, repeats=7).parse_args(arguments)
    ranks = (None, 8) if options.small else _RANKS
    rows = [asyncio.run(_publications(rank, options.repeats)) for rank in ranks]
    full = rows[0]
    table = [
        {**row, "times the bytes": full["MB"] / row["MB"], "times the seconds": full["s"] / row["s"]} for row in rows
    ]
    note = f"SmolLM2-135M in float32, medians of {options.repeats}"
    show(options.json, Table("engine", note, _passes(options.repeats)), Table("publication", note, table))


@torch.inference_mode()
def _passes(repeats: int, sequences: int = 16, prompt: int = 200, sampled: int = 16) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    config, limits = ModelConfig(path="smollm2"), prompt + sampled + 1
    models = {
        "base": CachedModel(load_model(config, 0), torch.float32, 4096),
        "rank 16": CachedModel(load_model(config, 0, LoraConfig(rank=16)), torch.float32, 4096),
    }
    tokens = np.random.default_rng(0).integers(100, 40_000, (sequences, limits)).astype(np.int32)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(repeats):
        for name, model in models.items():
            cache, began = KVCache(sequences, limits), time.process_time()
            model.extend(cache, slice(0, sequences), list(tokens[:, :prompt]), [0] * sequences)
            read = time.process_time()
            for at in range(prompt, prompt + sampled):
                model.extend(cache, slice(0, sequences), list(tokens[:, at : at + 1]), [at] * sequences)
            seconds[name].append((read - began, (time.process_time() - read) / sampled))
    medians = {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in seconds.items()}
    base = medians["base"]
    return [
        {"model": name, "read ms": 1e3 * read, "times": read / base[0], "decode ms": 1e3 * one, "times ": one / base[1]}
        for name, (read, one) in medians.items()
    ]


async def _publications(rank: int | None, repeats: int) -> dict[str, Any]:
    config = ModelConfig(path="smollm2")
    model = load_model(config, 0, None if rank is None else LoraConfig(rank=rank))
    source = EmbeddedSource(model, base_directory(config), Compute(None))
    engine = build(EngineConfig, {"kind": "vllm", "batch": 8})
    adapters: Exported | None = None
    with tempfile.TemporaryDirectory() as folder:
        if rank is not None:
            await source.export(Path(folder) / "adapter")
            adapters = Exported.read(Path(folder) / "adapter")
            engine = adapters.served_by(engine)
        opened, publication = await open_engine(
            engine,
            source,
            serve=lambda number: ServerProcess(base_directory(config), engine, Path(folder) / "log"),
            stop_token_ids=[],
            adapters=adapters,
        )
        seconds = []
        for version in range(repeats + 1):
            started = time.perf_counter()
            await publication.publish(version)
            seconds.append(time.perf_counter() - started)
        await opened.close()
    size = sum(4 * torch.Size(shape).numel() for shape in source.model.shapes.values())
    return {"published": "all weights" if rank is None else f"rank {rank}", "MB": size / 1e6, "s": median(seconds[1:])}


if __name__ == "__main__":
    main()
