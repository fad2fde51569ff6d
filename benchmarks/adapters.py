"""Adapters beside full weights: what publication to a vLLM server costs, without its proof.

SmolLM2 on vLLM's CPU build; first `treadle models get smollm2` and `make vllm-env`. Its LoRA kernels are not the GPU's.

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

import torch

from benchmarks.measure import Table, make_parser, show
from treadle.core.config import build
from treadle.engines.compute import Compute
from treadle.engines.config import EngineConfig
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
    show(options.json, Table("adapters", f"SmolLM2-135M in float32, medians of {options.repeats}", table))


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
