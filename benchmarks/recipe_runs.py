"""A recipe over several seeds, or with one setting changed at a time: table, JSON file, a picture of several seeds.

    .venv/bin/python benchmarks/recipe_runs.py search-small --runs runs/search       every variant, seeds 0 to 2
    .venv/bin/python benchmarks/recipe_runs.py sql-small --runs runs/sql --jobs 2    two runs at a time
    .venv/bin/python benchmarks/recipe_runs.py smollm2-tools --runs runs/smollm2 --seeds 0

Runs that are complete in `--runs` are not repeated, and begun ones are resumed, so that the work may be interrupted; no
seed is left out. Seconds are of a run beside `--jobs` - 1 others. The bound of a lift is that of the difference of two
shares, each of its own tasks: p1 - p0 - 1.96 sqrt(p0 (1 - p0) / n + p1 (1 - p1) / n).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.benchmarks.report import machine
from treadle.core.types import Task
from treadle.envs.phone_book import tasks

ROOT = Path(__file__).resolve().parent.parent
TREADLE = (sys.executable, "-m", "treadle.cli.main")


@dataclass(frozen=True)
class Study:
    """Says what is run: a recipe, with each variant's settings, on every seed."""

    recipe: str
    variants: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...] = (0, 1, 2)
    common: tuple[str, ...] = ()


STUDIES: Mapping[str, Study] = {
    "smollm2-tools": Study("smollm2-tools", {"default": ()}),
    "smollm2-settings": Study(
        "smollm2-tools",
        {
            "default": (),
            "groups of 4": ("training.group_size=4", "training.tasks_per_update=32"),
            "groups of 16": ("training.group_size=16", "training.tasks_per_update=8"),
            "half the rate": ("training.optimizer.learning_rate=5e-6",),
            "twice the rate": ("training.optimizer.learning_rate=2e-5",),
            "entropy bonus": ("algorithm.entropy_coef=0.01",),
            "kl": ("algorithm.kl.coef=0.01",),
            "one hop first": ("data.train.source=recipe_runs:one_hop_first",),
        },
        seeds=(0,),
        common=(
            *("orchestration.updates=6", "orchestration.checkpoint_every=6"),
            *("evaluation.every=6", "data.held_out.options.count=256", "training.threads=1"),
        ),
    ),
    "search-small": Study("search-small", {"synchronous": (), "max_staleness 2": ("orchestration.max_staleness=2",)}),
    "sql-small": Study(
        "sql-small",
        {
            "tree": ("training.packing=tree",),
            "step": ("training.packing=step",),
            "one sequence a trajectory": ("training.packing=chain",),
        },
    ),
}
"""name -> what is run. The updates of one study are of equally many attempts."""


def one_hop_first(split: str, count: int, seed: int = 0) -> list[Task]:
    """Return tasks of one hop for the first three updates (48 tasks), then of both kinds in turn."""
    made = tasks(split, count + 48, seed)
    return [*made[0:96:2], *made[96:]][:count]


def main() -> None:
    """Run what is missing, then write table, JSON and, of several seeds, the picture."""
    parser = argparse.ArgumentParser(description="Train a recipe over seeds and variants.")
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--runs", type=Path, required=True, help="where runs lie, and are looked for")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the study's")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="instead of all variants")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    study = STUDIES[options.study]
    names = options.only or list(study.variants)
    todo = [(name, seed) for seed in options.seeds or study.seeds for name in names]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(lambda item: play(study, item[0], item[1], options.runs), todo))
    rows = [{"variant": name, **row(run)} for (name, _), run in zip(todo, runs, strict=True)]
    result = {"machine": machine(), "jobs": options.jobs, "common": study.common, "variants": study.variants}
    stem = options.study.replace("-", "_")
    (ROOT / "benchmarks" / "results" / f"{stem}.json").write_text(json.dumps({**result, "runs": rows}, indent=2) + "\n")
    if len(study.seeds) > 1:
        picture = ROOT / "docs" / "images" / f"{stem}.png"
        subprocess.run([*TREADLE, "plot", *map(str, runs), "--output", str(picture)], check=True)
    print("\n".join(table(rows)))


def play(study: Study, variant: str, seed: int, runs: Path) -> Path:
    """Return the directory of one complete run, made if it is missing; `peak.json` in it is its most resident memory.

    Of a run that was resumed, that is its last process's.
    """
    name = f"{variant.replace(' ', '-')}-seed{seed}"
    run = runs / name
    if not (run / "summary.json").is_file():
        how = ["--resume"] if run.is_dir() else [f"seed={seed}", *study.common, *study.variants[variant]]
        command = [*TREADLE, "train", study.recipe, *how, "--runs", str(runs), "--name", name]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        _, status, usage = os.wait4(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}).pid, 0)
        if run.is_dir():
            (run / "peak.json").write_text(json.dumps(usage.ru_maxrss * 1024))
        if status:
            raise SystemExit(os.waitstatus_to_exitcode(status))
    return run


def row(run: Path) -> dict[str, Any]:
    """Return the figures of one run; by kind of task: success before and after, and the lift's lower bound."""
    summary = json.loads((run / "summary.json").read_text())
    metrics = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    sampled = [e for e in summary["evaluations"] if e["temperature"] > 0]
    first, last, number = sampled[0]["by"], sampled[-1]["by"], sampled[0]["by_tasks"]
    return {
        "seed": summary["seed"],
        "before": summary["held_out_success_before"],
        "after": summary["held_out_success_after"],
        "kinds": {
            kind: {
                "tasks": number[kind],
                "before": first[kind],
                "after": last[kind],
                "lift_at_least": lower_bound(first[kind], last[kind], number[kind]),
            }
            for kind in first
        },
        "training_success": [line["success"] for line in metrics if line["kind"] == "update"],
        "warm_start_loss": (summary.get("warm_start") or {}).get("loss"),
        "wall_seconds": summary["wall_seconds"],
        "cpu_seconds": summary["cpu_seconds"],
        "peak_bytes": json.loads(peak.read_text()) if (peak := run / "peak.json").is_file() else None,
        "weights_sha256": summary["weights_sha256"],
    }


def lower_bound(before: float, after: float, tasks: int) -> float:
    """Return the lower 95% bound of the lift between two shares of `tasks` tasks each."""
    return after - before - 1.96 * math.sqrt((before * (1 - before) + after * (1 - after)) / tasks)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the rows as a Markdown table."""
    kinds = list(rows[0]["kinds"])
    head = ["", "seed", *kinds, "all", *(f"lift at least, {kind}" for kind in kinds), "min", "GiB"]
    yield from ("| " + " | ".join(head) + " |", "|" + "---|" * len(head))
    for r in rows:
        cells = [r["variant"], str(r["seed"])]
        cells += [f"{share['before']:.3f} → {share['after']:.3f}" for share in (*r["kinds"].values(), r)]
        cells += [f"{kind['lift_at_least']:.3f}" for kind in r["kinds"].values()]
        peak = f"{r['peak_bytes'] / 2**30:.1f}" if r["peak_bytes"] else ""
        yield "| " + " | ".join([*cells, f"{r['wall_seconds'] / 60:.0f}", peak]) + " |"


if __name__ == "__main__":
    main()
