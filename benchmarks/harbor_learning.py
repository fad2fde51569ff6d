"""A model of a few weights learns from Harbor's trials: three seeds, synchronously and asynchronously.

    make harbor-env; apt-get install bubblewrap
    .venv/bin/python benchmarks/harbor_learning.py --runs runs/harbor-learning                    all seven
    .venv/bin/python benchmarks/harbor_learning.py --runs runs/harbor-learning --only asynchronous --seeds 0
    .venv/bin/python benchmarks/harbor_learning.py orchestration.updates=2 --runs /tmp/try --seeds 0

Each is `treadle train harbor-small`: 64 trials an update, each with a sandbox, an agent and a verifier of its own. Runs
that are complete in `--runs` are not repeated, and begun ones are resumed; no seed is left out. One seed is also
trained with another reduction. The lift is the success of the last five updates less that of the first five; its bound
is that of the difference of two shares, 1.96 sqrt(p0 (1 - p0) / n + p1 (1 - p1) / n) below it, with n trials on each
side.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.benchmarks.report import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "harbor_learning.json"
PICTURE = ROOT / "docs" / "images" / "harbor_learning.png"
TREADLE = (sys.executable, "-m", "treadle.cli.main")
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "synchronous": (),
    "asynchronous": ("orchestration.max_staleness=2", "algorithm.correction.token_tis=2.0"),
    "seq_mean_token_sum_norm": ("algorithm.reduction=seq_mean_token_sum_norm", "algorithm.length_norm=12"),
}
ONE_SEED = ("seq_mean_token_sum_norm",)
ENDS = 5  # updates at either end of a run that are compared


def main() -> None:
    """Run what is missing, then write table, JSON and picture."""
    parser = argparse.ArgumentParser(description="Train harbor-small over several seeds, in two modes.")
    parser.add_argument("--runs", type=Path, required=True, help="where runs lie, and are looked for")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("overrides", nargs="*", help="key.path=value, as for treadle train; then nothing is written")
    options = parser.parse_args()
    chosen = [(v, seed) for v in options.only for seed in (options.seeds[:1] if v in ONE_SEED else options.seeds)]
    runs = [play(variant, seed, options.runs, options.overrides) for variant, seed in chosen]
    rows = [row(variant, seed, run) for (variant, seed), run in zip(chosen, runs, strict=True)]
    print("\n".join(table(rows)))
    if not options.overrides:
        result = {"machine": machine(), "settings": {v: list(s) for v, s in VARIANTS.items()}, "runs": rows}
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")
        subprocess.run([*TREADLE, "plot", *map(str, runs), "--output", str(PICTURE)], check=True)


def play(variant: str, seed: int, runs: Path, overrides: Sequence[str]) -> Path:
    """Return the directory of one complete run, made if it is missing."""
    name = f"{variant}-seed{seed}"
    if not (runs / name / "summary.json").is_file():
        how = ["--resume"] if (runs / name).is_dir() else [f"seed={seed}", *VARIANTS[variant], *overrides]
        command = [*TREADLE, "train", "harbor-small", *how, "--runs", str(runs), "--name", name]
        subprocess.run(command, check=True)
    return runs / name


def row(variant: str, seed: int, run: Path) -> dict[str, Any]:
    """Return one run's figures."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if line["kind"] == "update"]
    curve = [(line["success"], int(line["trajectories"] - line["failed"])) for line in updates]
    (before, first), (after, last) = _share(curve[:ENDS]), _share(curve[-ENDS:])
    half = 1.96 * math.sqrt(before * (1 - before) / first + after * (1 - after) / last)
    return {
        "variant": variant,
        "seed": seed,
        "updates": len(updates),
        "before": before,
        "after": after,
        "lift": after - before,
        "lift_lower_95": after - before - half,
        "failed": sum(line["failed"] for line in updates),
        "seconds": updates[-1]["wall_seconds"],
        "cpu_seconds": updates[-1]["cpu_seconds"],
        "curve": [success for success, _ in curve],
    }


def _share(curve: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return the success over some updates, and of how many trials."""
    trials = sum(count for _, count in curve)
    return sum(success * count for success, count in curve) / trials, trials


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return Markdown."""
    lines = ["| | seed | before | after | lift, lower bound | failed | minutes |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        figures = f"{r['before']:.3f} | {r['after']:.3f} | {r['lift_lower_95']:.3f}"
        lines.append(f"| {r['variant']} | {r['seed']} | {figures} | {r['failed']:.0f} | {r['seconds'] / 60:.0f} |")
    return lines


if __name__ == "__main__":
    main()
