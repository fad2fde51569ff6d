"""What helps SmolLM2 to learn its tools: `smollm2-tools` after six updates, with one setting changed at a time.

    treadle models get smollm2
    .venv/bin/python benchmarks/smollm2_variants.py --runs runs/variants                   one seed, some minutes a run
    .venv/bin/python benchmarks/smollm2_variants.py --runs runs/variants --only default kl

Runs that are complete in `--runs` are not repeated, and begun ones are resumed, so that the work may be interrupted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smollm2_seeds import ROOT, play

from treadle.benchmarks.report import machine
from treadle.core.types import Task
from treadle.envs.phone_book import tasks

RESULTS = ROOT / "benchmarks" / "results" / "smollm2_variants.json"
COMMON = (
    *("orchestration.updates=6", "orchestration.checkpoint_every=6"),
    *("evaluation.every=6", "data.held_out.options.count=256"),
)
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "groups of 4": ("training.group_size=4", "training.tasks_per_update=32"),
    "groups of 16": ("training.group_size=16", "training.tasks_per_update=8"),
    "half the rate": ("training.optimizer.learning_rate=5e-6",),
    "entropy bonus": ("algorithm.entropy_coef=0.01",),
    "kl": ("algorithm.kl.coef=0.01",),
    "one hop first": ("data.train.source=smollm2_variants:one_hop_first",),
}
"""name -> settings. All make updates of 128 attempts."""


def one_hop_first(split: str, count: int, seed: int = 0) -> list[Task]:
    """Return tasks of one hop for the first three updates (48 tasks), then of both kinds in turn."""
    made = tasks(split, count + 48, seed)
    return [*made[0:96:2], *made[96:]][:count]


def main() -> None:
    """Run what is missing, then write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description="Compare settings of smollm2-tools.")
    parser.add_argument("--runs", type=Path, required=True, help="where runs lie, and are looked for")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    rows = [row(name, play(name.replace(" ", "-"), options.runs, (*COMMON, *VARIANTS[name]))) for name in options.only]
    RESULTS.write_text(json.dumps({"machine": machine(), "overrides": COMMON, "variants": rows}, indent=2) + "\n")
    print("\n".join(table(rows)))


def row(name: str, run: Path) -> dict[str, Any]:
    """Return a variant's figures: success of training by update, held-out success before and after by hops."""
    summary = json.loads((run / "summary.json").read_text())
    metrics = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    before, *_, after = summary["evaluations"]
    return {
        "variant": name,
        "settings": VARIANTS[name],
        "training_success": [line["success"] for line in metrics if line["kind"] == "update"],
        "before": before["by"] | {"all": before["success"]},
        "after": after["by"] | {"all": after["success"]},
        "cpu_seconds": summary["cpu_seconds"],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows as a Markdown table."""
    lines = ["| | one hop | two hops | all |", "|---|---|---|---|"]
    for r in rows:
        shares = (f"{r['after'][kind]:.3f}" for kind in ("1", "2", "all"))
        lines.append(f"| {r['variant']} | {' | '.join(shares)} |")
    return lines


if __name__ == "__main__":
    main()
