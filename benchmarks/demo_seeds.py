"""The demo over several seeds, from nothing: a table, benchmarks/results/demo_seeds.json and the README's picture.

    make demo-seeds                               seeds 0 to 4, one after another
    .venv/bin/python benchmarks/demo_seeds.py --seeds 0 1 --jobs 2
    .venv/bin/python benchmarks/demo_seeds.py --seeds 0 1 2 --name demo_ranks placement.learner.ranks=2

Simplified: every seed runs in the same way `make demo` runs it, but with an empty warm-start cache, so that its CPU
seconds are those of a first run. No seed is repeated or left out. Only the demo as it is makes the picture.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from treadle.orchestration.reporting.curve import smoothed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "demo_seeds.png"


def main() -> None:
    """Run the seeds, then write table, JSON and picture."""
    parser = argparse.ArgumentParser(description="Run the demo over several seeds.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each computes with one thread")
    parser.add_argument("--name", default="demo_seeds", help="of the file of results")
    parser.add_argument("overrides", nargs="*", help="key.path=value, as for treadle train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(lambda seed: play(seed, Path(scratch), options.overrides), options.seeds))
    rows = [row(summary) for summary, _ in runs]
    after = [r["after"] for r in rows]
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "overrides": options.overrides,
        "jobs": options.jobs,
        "seeds": rows,
        "mean_after": float(np.mean(after)),
        "lowest_after": min(after),
        "highest_before": max(r["before"] for r in rows),
        "longest_cpu_seconds": max(r["cpu_seconds"] for r in rows),
    }
    (RESULTS / f"{options.name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if not options.overrides:
        draw([metrics for _, metrics in runs], PICTURE)
    print(json.dumps(result, indent=2))


def play(seed: int, scratch: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One seed in its own process; returns its summary and the rows of its metrics.jsonl."""
    command = [sys.executable, "-m", "treadle.cli.main", "train", "demo", f"seed={seed}", *overrides]
    environment = {**os.environ, "TREADLE_CACHE": str(scratch / f"cache-{seed}")}
    subprocess.run([*command, "--runs", str(scratch), "--name", f"seed{seed}"], check=True, env=environment)
    run = scratch / f"seed{seed}"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run / "summary.json").read_text()), metrics


def row(summary: dict[str, Any]) -> dict[str, Any]:
    """The figures of one seed."""
    sampled = [e for e in summary["evaluations"] if e["temperature"] > 0]
    return {
        "seed": summary["seed"],
        "before": summary["held_out_success_before"],
        "after": summary["held_out_success_after"],
        "greedy_before": summary["held_out_greedy_before"],
        "greedy_after": summary["held_out_greedy_after"],
        "after_by_hops": sampled[-1]["by"],
        "held_out_tasks": summary["held_out_tasks"],
        "warm_start_loss": summary["warm_start"]["loss"],
        "updates": summary["updates"],
        "cpu_seconds": summary["cpu_seconds"],
        "weights_sha256": summary["weights_sha256"],
    }


def draw(runs: Sequence[Sequence[dict[str, Any]]], path: Path) -> None:
    """Mean and range over the seeds: held-out success as points, reward in training as a line."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    reward = np.array([smoothed([r["reward_mean"] for r in run if r["kind"] == "update"], width=5) for run in runs])
    updates = np.arange(1, reward.shape[1] + 1)
    axes.fill_between(updates, reward.min(0), reward.max(0), color="#9db8d9", alpha=0.45, linewidth=0)
    axes.plot(
        updates, reward.mean(0), color="#2f6db5", linewidth=1.8, label="reward in training (moving average over 5)"
    )
    points = [[r for r in run if r["kind"] == "evaluation" and r["temperature"] > 0] for run in runs]
    at = [r["update"] for r in points[0]]
    success = np.array([[r["success"] for r in run] for run in points])
    axes.fill_between(at, success.min(0), success.max(0), color="#d1603d", alpha=0.2, linewidth=0)
    axes.plot(at, success.mean(0), "o-", color="#d1603d", markersize=5, label="success on held-out tasks")
    axes.set(xlabel="update", ylabel="share of tasks solved (temperature 1)", ylim=(0, 1.02))
    axes.set_title(f"treadle train demo: mean and range over {len(runs)} seeds")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
