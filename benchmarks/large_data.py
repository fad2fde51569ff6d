"""What a million rows of Parquet cost before the first task: CPU seconds and memory, in a fresh process.

The file has one row group, as `pyarrow.parquet.write_table` writes it, with prompts as messages, nested ground truths
and a column that no task is made of. Run: python -m benchmarks.large_data [--rows 1000000]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


def write_rows(path: Path, rows: int) -> None:
    """Write rows with prompts of 200 characters, in a single row group."""
    digits = pa.array(np.arange(rows)).cast(pa.string())
    letters = np.random.default_rng(0).integers(97, 123, (rows, 190), dtype=np.uint8)
    text = pa.Array.from_buffers(
        pa.large_string(), rows, [None, pa.py_buffer(np.arange(0, letters.size + 1, 190)), pa.py_buffer(letters)]
    )
    content = pc.binary_join_element_wise(digits, text.cast(pa.string()), " ")
    role = pa.array(["user"] * rows)
    messages = pa.StructArray.from_arrays([role, content], ["role", "content"])
    prompt = pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), messages)
    truth = pa.StructArray.from_arrays([pa.array(["rule"] * rows), digits], ["style", "ground_truth"])
    table = pa.table({"data_source": role, "prompt": prompt, "reward_model": truth, "unused": content})
    pq.write_table(table, path, row_group_size=rows)


def measure(path: Path) -> dict[str, Any]:
    """Return what the first shuffled task costs in this process, and what a thousand more do."""
    from treadle.core.config import build
    from treadle.data.tasks import tasks_sha256
    from treadle.loop.task_queue import TaskOrder
    from treadle.plan.config import RunConfig
    from treadle.plan.inputs import load_inputs

    columns = {"ground_truth": "reward_model.ground_truth"}
    data = {"train": {"source": str(path)}, "columns": columns}
    model = {"build": {"model_type": "qwen3"}, "tokenizer": "demo"}
    config = build(RunConfig, {"environment": "arithmetic", "data": data, "model": model})
    before, began = _megabytes(), time.process_time()
    inputs = load_inputs(config)
    tasks_sha256(inputs.train)
    order = TaskOrder(inputs.train, seed=0, shuffle=True)
    first = order.at(0)[2]
    figures: dict[str, Any] = {"tasks": len(inputs.train), "first": first.task_id}
    figures |= {"cpu_seconds": time.process_time(), "of_loading": time.process_time() - began}
    figures["megabytes"] = _megabytes() - before
    began = time.process_time()
    for index in range(1, 1001):
        order.at(index)
    figures["ms_a_task"] = time.process_time() - began
    return figures


def _megabytes() -> float:
    """Return the largest resident size of this process so far (ru_maxrss would count the parent's, too)."""
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(peak.split()[1]) / 1024


def measured(rows: int) -> dict[str, Any]:
    """Return `measure` of a file with so many rows, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write_rows(path, rows)
        command = [sys.executable, __file__, "--measure", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures: dict[str, Any] = json.loads(done.stdout)
        return {**figures, "file_megabytes": path.stat().st_size / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--measure", type=Path, help="measure this file, in this process")
    options = parser.parse_args()
    print(json.dumps(measure(options.measure) if options.measure else measured(options.rows), indent=2))


if __name__ == "__main__":
    main()
