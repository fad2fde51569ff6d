"""Threads: what more of them gain, and what they cost beside another busy process, by how they wait.

Each row is a process of its own, since OpenMP reads its variables once. The work is that of a warm start's step: a
forward and a backward pass over sequences of 128 tokens, and an optimizer step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

from treadle.benchmarks.report import Report, Row
from treadle.core.errors import RunError
from treadle.orchestration.setup.thread_count import available_cores

_SHAPES: Mapping[str, Mapping[str, int]] = {
    "demo": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 704},
    "small": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 8192},
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
}
_WORK = {"demo": (20, 16), "small": (5, 16), "smollm2-135m": (1, 2)}  # steps of a round, sequences of a step
_WAITS: Mapping[str, Mapping[str, str]] = {
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "torch's default": {},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
}


def measure(threads: int, repeats: int) -> Report:
    """Measure seconds of wall clock and of CPU a step, alone and beside a busy loop; `threads` has no effect."""
    counts = sorted({1, available_cores()})
    plan = [(model, count, "passive") for model in _SHAPES for count in counts]
    plan += [("demo", counts[-1], wait) for wait in _WAITS if wait != "passive"]
    rows: list[Row] = []
    for model, count, wait in plan:
        alone = _seconds(model, count, wait, repeats)
        with _busy_loop():
            beside = _seconds(model, count, wait, repeats)
        rows.append(
            {
                "model": model,
                "parameters": alone["parameters"],
                "threads": count,
                "waiting": wait,
                "s a step": alone["wall"],
                "CPU s": alone["cpu"],
                "s beside a busy loop": beside["wall"],
                "times alone": beside["wall"] / alone["wall"],
            }
        )
    return Report("threads", f"medians of {repeats} rounds, {available_cores()} cores free", rows)


def _seconds(model: str, threads: int, wait: str, repeats: int) -> dict[str, Any]:
    unset = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-m", __name__, model, str(threads), str(repeats)],
        env={**unset, **_WAITS[wait]},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunError(f"the measuring process ended with status {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def _busy_loop() -> Iterator[None]:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


def _measured(model: str, threads: int, repeats: int) -> dict[str, Any]:
    """In the process of a row."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(threads)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": True}
    built: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **_SHAPES[model], **heads))
    optimizer = torch.optim.AdamW(built.parameters(), fused=True)
    steps, sequences = _WORK[model]
    ids = torch.randint(_SHAPES[model]["vocab_size"], (sequences, 128), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # warms up
    wall, cpu = [], []
    for _ in range(repeats):
        started = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        wall.append((time.perf_counter() - started[0]) / steps)
        cpu.append((time.process_time() - started[1]) / steps)
    parameters = sum(p.numel() for p in built.parameters())
    return {"parameters": parameters, "wall": median(wall), "cpu": median(cpu)}


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201  # for the process that started this one
