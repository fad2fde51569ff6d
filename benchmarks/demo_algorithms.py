"""The demo's task under several algorithms and seeds: a table, a JSON file and two pictures in docs/images.

    .venv/bin/python benchmarks/demo_algorithms.py --runs runs/algorithms                  all of them, about an hour
    .venv/bin/python benchmarks/demo_algorithms.py --runs runs/algorithms --only grpo rloo --seeds 0 1

Simplified: a longer warm start and more updates than the demo's, with a lower learning rate; one thread a run. Runs
that are complete in `--runs` are not repeated, so that the work may be interrupted; no seed is left out. `gspo` and
`cispo` make two updates a batch: with one, every ratio is 1 and all losses are the same. `asynchronous` is grpo with
groups sampled beside training, up to two versions old, and token-level truncated importance sampling.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "demo_algorithms.json"
PICTURES = ROOT / "docs" / "images"
COMMON = (
    *("evaluation.every=10", "evaluation.greedy_too=false", "training.threads=1"),
    *("warm_start.steps=500", "warm_start.batch_size=64", "warm_start.optimizer.learning_rate=3e-3"),
    *("orchestration.updates=60", "training.optimizer.learning_rate=5e-4", "data.train.options.count=1920"),
)
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "grpo": (),
    "rloo": ("algorithm.advantage=rloo",),
    "reinforce++": ("algorithm.advantage=reinforce++",),
    "step_return": (
        "algorithm.advantage=step_return",
        "data.train.options.page_reward=0.1",
        "evaluation.success_of=answer",
    ),
    "gspo": ("algorithm.policy_loss=gspo", "training.updates_per_batch=2"),
    "cispo": ("algorithm.policy_loss=cispo", "training.updates_per_batch=2"),
    "asynchronous": ("orchestration.max_staleness=2", "algorithm.correction.token_tis=2.0"),
    "seq_mean_token_sum_norm": ("algorithm.reduction=seq_mean_token_sum_norm", "algorithm.length_norm=24"),
}
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95% point of Student's t, by number of seeds


def main() -> None:
    """Run what is missing, then write table, JSON and pictures."""
    parser = argparse.ArgumentParser(description="Compare algorithms on the demo's task.")
    parser.add_argument("--runs", type=Path, required=True, help="where runs lie, and are looked for")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    found = {
        variant: [evaluations(play(variant, seed, options.runs)) for seed in options.seeds] for variant in options.only
    }
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "overrides": list(COMMON),
        "seeds": options.seeds,
        "variants": [row(variant, runs) for variant, runs in found.items()],
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    apart = ("seq_mean_token_sum_norm", "asynchronous")
    compared = {name: runs for name, runs in found.items() if name not in apart}
    draw(compared, "one line an algorithm", PICTURES / "demo_algorithms.png")
    reductions = {"token_mean": found.get("grpo"), "seq_mean_token_sum_norm": found.get("seq_mean_token_sum_norm")}
    draw({k: v for k, v in reductions.items() if v}, "two reductions of grpo", PICTURES / "demo_reductions.png")
    modes = {"synchronous": found.get("grpo"), "asynchronous, max_staleness 2": found.get("asynchronous")}
    draw({k: v for k, v in modes.items() if v}, "grpo in two modes", PICTURES / "demo_async.png")
    print("\n".join(table(result["variants"])))


def play(variant: str, seed: int, runs: Path) -> Path:
    """The directory of one complete run, made if it is missing."""
    name = f"{variant}-seed{seed}"
    if not (runs / name / "summary.json").is_file():
        command = [sys.executable, "-m", "treadle.cli.main", "train", "demo"]
        settings = [f"seed={seed}", *COMMON, *VARIANTS[variant]]
        how = ["--resume"] if (runs / name).is_dir() else settings
        subprocess.run([*command, *how, "--runs", str(runs), "--name", name], check=True)
    return runs / name


def evaluations(run: Path) -> list[tuple[int, float]]:
    """(update, success on held-out tasks at temperature 1), from before training to its end."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(r["update"], r["success"]) for r in rows if r["kind"] == "evaluation" and r["temperature"] > 0]


def row(variant: str, runs: Sequence[Sequence[tuple[int, float]]]) -> dict[str, Any]:
    """One algorithm's figures over its seeds. lift: after less before; its mean has a 95% interval over seeds."""
    before, after = [run[0][1] for run in runs], [run[-1][1] for run in runs]
    lift = np.subtract(after, before)
    half = T_95[len(lift)] * float(lift.std(ddof=1)) / math.sqrt(len(lift)) if len(lift) in T_95 else math.nan
    return {
        "variant": variant,
        "settings": list(VARIANTS[variant]),
        "before": before,
        "after": after,
        "mean_after": float(np.mean(after)),
        "lift_mean": float(lift.mean()),
        "lift_lower_95": float(lift.mean()) - half,
        "curves": [list(map(list, run)) for run in runs],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown."""
    lines = ["| | before, by seed | after, by seed | mean lift | its lower 95% bound |", "|---|---|---|---|---|"]
    for r in rows:
        before, after = (" / ".join(f"{x:.3f}" for x in r[key]) for key in ("before", "after"))
        lines.append(f"| `{r['variant']}` | {before} | {after} | {r['lift_mean']:.3f} | {r['lift_lower_95']:.3f} |")
    return lines


def draw(found: Mapping[str, Sequence[Sequence[tuple[int, float]]]], title: str, path: Path) -> None:
    """Mean and range over seeds of held-out success, by update."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes: Axes = figure.subplots()
    for variant, runs in found.items():
        at = [update for update, _ in runs[0]]
        success = np.array([[value for _, value in run] for run in runs])
        [line] = axes.plot(at, success.mean(0), "o-", markersize=4, label=variant)
        axes.fill_between(at, success.min(0), success.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="update", ylabel="success on held-out tasks (temperature 1)", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
