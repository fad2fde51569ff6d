"""A pretrained model learns to use tools, over several seeds: table, JSON file and picture.

    treadle models get smollm2
    .venv/bin/python benchmarks/smollm2_seeds.py --runs runs/smollm2               seeds 0 to 2, one after another
    .venv/bin/python benchmarks/smollm2_seeds.py --runs runs/smollm2 --seeds 0     one of them

Runs that are complete in `--runs` are not repeated, and begun ones are resumed, so that the work may be interrupted; no
seed is left out. The bound of a lift is that of the difference of two shares, each of its own tasks: p1 - p0 - 1.96
sqrt(p0 (1 - p0) / n + p1 (1 - p1) / n).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treadle.benchmarks.report import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_seeds.json"
PICTURE = ROOT / "docs" / "images" / "smollm2_seeds.png"
TREADLE = (sys.executable, "-m", "treadle.cli.main")


def main() -> None:
    """Run what is missing, then write table, JSON and picture."""
    parser = argparse.ArgumentParser(description="Train smollm2-tools over several seeds.")
    parser.add_argument("--runs", type=Path, required=True, help="where runs lie, and are looked for")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="key.path=value, as for treadle train")
    options = parser.parse_args()
    runs = [play(f"seed{seed}", options.runs, (f"seed={seed}", *options.overrides)) for seed in options.seeds]
    rows = [row(run) for run in runs]
    result = {"machine": machine(), "overrides": options.overrides, "seeds": rows}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    subprocess.run([*TREADLE, "plot", *map(str, runs), "--output", str(PICTURE)], check=True)
    print("\n".join(table(rows)))


def play(name: str, runs: Path, settings: Sequence[str]) -> Path:
    """Return the directory of one complete run, made if it is missing; `peak.json` in it is its most resident memory.

    Of a run that was resumed, that is its last process's.
    """
    run = runs / name
    if not (run / "summary.json").is_file():
        how = ["--resume"] if run.is_dir() else settings
        command = [*TREADLE, "train", "smollm2-tools", *how, "--runs", str(runs), "--name", name]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        _, status, usage = os.wait4(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}).pid, 0)
        if status:
            raise SystemExit(os.waitstatus_to_exitcode(status))
        (run / "peak.json").write_text(json.dumps(usage.ru_maxrss * 1024))
    return run


def row(run: Path) -> dict[str, Any]:
    """Return the figures of one seed; by number of hops: success before and after, and the lift's lower bound."""
    summary = json.loads((run / "summary.json").read_text())
    sampled = [e for e in summary["evaluations"] if e["temperature"] > 0]
    first, last, tasks = sampled[0]["by"], sampled[-1]["by"], sampled[0]["by_tasks"]
    return {
        "seed": summary["seed"],
        "before": summary["held_out_success_before"],
        "after": summary["held_out_success_after"],
        "hops": {
            hops: {
                "tasks": tasks[hops],
                "before": first[hops],
                "after": last[hops],
                "lift_at_least": lower_bound(first[hops], last[hops], tasks[hops]),
            }
            for hops in first
        },
        "updates": summary["updates"],
        "wall_seconds": summary["wall_seconds"],
        "cpu_seconds": summary["cpu_seconds"],
        "peak_bytes": json.loads((run / "peak.json").read_text()),
        "weights_sha256": summary["weights_sha256"],
    }


def lower_bound(before: float, after: float, tasks: int) -> float:
    """Return the lower 95% bound of the lift between two shares of `tasks` tasks each."""
    return after - before - 1.96 * math.sqrt((before * (1 - before) + after * (1 - after)) / tasks)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows as a Markdown table."""
    kinds = list(rows[0]["hops"])
    head = [
        "seed",
        "all",
        *(f"{hops} hops" for hops in kinds),
        *(f"lift at least, {hops}" for hops in kinds),
        "min",
        "GiB",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        shares = [r, *r["hops"].values()]
        cells = [str(r["seed"]), *(f"{s['before']:.3f} → {s['after']:.3f}" for s in shares)]
        cells += [f"{kind['lift_at_least']:.3f}" for kind in r["hops"].values()]
        cells += [f"{r['wall_seconds'] / 60:.0f}", f"{r['peak_bytes'] / 2**30:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
