"""Recipes over several seeds, or with one setting changed at a time: a table, a JSON file, a picture.

    python -m benchmarks.recipe_runs demo-seeds                              # five seeds
    python -m benchmarks.recipe_runs sql-small --runs runs/sql --jobs 2      # two runs at a time
    python -m benchmarks.recipe_runs smollm2-tools --seeds 0
    python -m benchmarks.recipe_runs demo-seeds --seeds 0 --runs /tmp/try orchestration.updates=2   # writes no results

Runs that are complete in `--runs` are not repeated, and interrupted ones are resumed. Before and after are the success
on held-out tasks at temperature 1; without any, the success in the first and the last five updates. The lower bound of
a run's lift is that of the difference of two shares, p1 - p0 - 1.96 sqrt(p0 (1 - p0) / n + p1 (1 - p1) / n); that of a
variant's mean lift over seeds is Student's, at 95%. Seconds are those of a run beside `--jobs` - 1 others.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.measure import RESULTS, machine
from treadle.core.types import Task
from treadle.envs.phone_book import tasks

ROOT = RESULTS.parent.parent
TREADLE = (sys.executable, "-m", "treadle.cli.main")
HIGH = 0.9  # success whose first evaluation is shown, with the tokens sampled until then
ENDS = 5  # updates at either end of a run without evaluations
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95% point of Student's t, by number of seeds
ASYNCHRONOUS = ("orchestration.max_staleness=2", "algorithm.correction.token_tis=2.0")


@dataclass(frozen=True)
class Study:
    """A recipe, with each variant's settings, on every seed.

    fresh: each run with an empty cache of warm starts. perturbed: of variants whose weights after the warm start are
    changed by about 1e-7 of themselves, the seed of the changes.
    """

    recipe: str
    variants: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...] = (0, 1, 2)
    common: tuple[str, ...] = ()
    fresh: bool = False
    perturbed: Mapping[str, int] = field(default_factory=dict)


_RANKS = ("placement.learner.ranks=2",)
_RAY = ("placement.kind=ray", *_RANKS, "placement.engines.count=2", "placement.rollout.workers=2")
_SAMPLED_TOKENS = ("algorithm.distillation.form=advantage", "training.optimizer.decay_from=0.5")
_STARTS: Mapping[str, tuple[str, ...]] = {
    "starts": ("rollout.starts={source: own, share: 0.5, target: 0.5}",),
    "from the beginning": (),
}
_COME_BACK = (  # few enough tasks for several epochs: a start needs a recorded attempt
    *("data.train.options.count=480", "data.shuffle=true", "data.held_out.options.count=512"),
    *("evaluation.every=5", "evaluation.greedy_too=false", "training.threads=1"),
)
_LONGER_DEMO = (
    *("evaluation.every=10", "evaluation.greedy_too=false", "training.threads=1"),
    *("warm_start.steps=500", "warm_start.batch_size=64", "warm_start.learning_rate=3e-3"),
    *("orchestration.updates=60", "training.optimizer.learning_rate=5e-4", "data.train.options.count=1920"),
)
STUDIES: Mapping[str, Study] = {
    "demo-seeds": Study("demo", {"default": ()}, seeds=(0, 1, 2, 3, 4), fresh=True),
    "demo-ranks": Study("demo", {"two ranks": _RANKS}),
    "demo-ray": Study("demo", {"on Ray": _RAY}),
    "demo-algorithms": Study(
        "demo",
        {
            "grpo": (),
            "rloo": ("algorithm.advantage=rloo",),
            "reinforce++": ("algorithm.advantage=reinforce++",),
            "step_return": (
                "algorithm.advantage=step_return",
                "data.train.options.page_reward=0.1",
                "evaluation.success_of=answer",
            ),
            # with one update a batch, every ratio would be 1 and all losses the same
            "gspo": ("algorithm.policy_loss=gspo", "training.updates_per_batch=2"),
            "cispo": ("algorithm.policy_loss=cispo", "training.updates_per_batch=2"),
            "asynchronous": ASYNCHRONOUS,
            "seq_mean_token_sum_norm": ("algorithm.reduction=seq_mean_token_sum_norm", "algorithm.length_norm=24"),
        },
        common=_LONGER_DEMO,
    ),
    "distill-small": Study(
        "distill-small",
        {
            "teacher": (),
            "sampled tokens": _SAMPLED_TOKENS,
            "and rewards": (*_SAMPLED_TOKENS, *("algorithm.distillation.rewards=1", "algorithm.distillation.coef=0.3")),
            "rewards": (
                *("algorithm.distillation=null", "algorithm.entropy_coef=0.01", "orchestration.updates=45"),
                "training.optimizer={learning_rate: 8e-4, warmup: 5}",
            ),
        },
        seeds=(1, 2, 3),  # the teacher is seed 0 of the demo
        common=("training.threads=1",),
    ),
    "harbor-learning": Study(
        "harbor-small",
        {
            "synchronous": (),
            "asynchronous": ASYNCHRONOUS,
            "seq_mean_token_sum_norm": ("algorithm.reduction=seq_mean_token_sum_norm", "algorithm.length_norm=12"),
        },
    ),
    "smollm2-tools": Study("smollm2-tools", {"default": ()}),
    "smollm2-tools-lora": Study("smollm2-tools-lora", {"default": ()}),
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
            "one hop first": ("data.train.source=benchmarks.recipe_runs:one_hop_first",),
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
    "notes-small": Study(
        "notes-small",
        {
            "with compaction": (),
            "summaries masked": ("rollout.compaction.trained=false",),
            "without compaction": ("rollout.compaction=null",),
        },
        common=("training.threads=1",),
    ),
    "notes-packings": Study(
        "notes-small",
        {
            "tree": ("training.packing=tree",),
            "step": ("training.packing=step",),
            "chain": ("training.packing=chain",),
            "max_staleness 2": ASYNCHRONOUS,
            "max_staleness 2, waiting": (*ASYNCHRONOUS, "orchestration.stale_policy=wait"),
        },
        seeds=(0, 2),
        common=("training.threads=1",),
    ),
    "structured-output": Study(
        "benchmarks/structured_output.yaml",
        {"structured output": (), "any text": ("data.train.options.structured=false",)},
        common=("training.threads=1",),
    ),
    "quest-small": Study(
        "quest-small",
        {
            "starts from solutions": (),
            "starts from own attempts": ("rollout.starts.source=own",),
            "forks": ("rollout.starts=null", "rollout.forks={width: 2}", "algorithm.advantage=forks"),
            "solutions in the warm start": ("rollout.starts=null", "warm_start.options.expert=1.0"),
            "from the beginning": ("rollout.starts=null",),
        },
        common=("evaluation.every=10", "orchestration.updates=60", "training.threads=1"),
    ),
    "look-small": Study(
        "look-small",
        {
            "synchronous": (),
            "max_staleness 2": (*ASYNCHRONOUS, "orchestration.updates=140", "training.optimizer.learning_rate=6e-4"),
            "with compaction": (
                "rollout.compaction={at: 60, keep_last: 0, prompt: 'What is seen?', max_tokens: 12}",
                *("rollout.max_steps=8", "warm_start.options.summaries=true", "warm_start.steps=1000"),
                "orchestration.updates=120",
            ),
            "all pixels 0": ("environment_options.blind=true",),
        },
        common=("training.threads=1",),
    ),
    "notes-starts": Study("notes-small", _STARTS, common=(*_COME_BACK, "orchestration.updates=120")),
    "search-starts": Study("search-small", _STARTS, common=_COME_BACK),
    # runs that differ in nothing but rounding
    "notes-rounding": Study(
        "notes-small",
        {
            "budget 1900": ("training.max_tokens_per_microbatch=1900",),
            "budget 2300": ("training.max_tokens_per_microbatch=2300",),
            "perturbed 1": (),
            "perturbed 2": (),
        },
        seeds=(0, 2),
        common=("training.threads=1",),
        perturbed={"perturbed 1": 1, "perturbed 2": 2},
    ),
}
"""Name -> study. The updates of one study have equally many attempts."""


def one_hop_first(split: str, count: int, seed: int = 0) -> list[Task]:
    """Return tasks of one hop for the first three updates (48 tasks), then of both kinds in turn."""
    made = tasks(split, count + 48, seed)
    return [*made[0:96:2], *made[96:]][:count]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing; print the table, write the JSON file and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--runs", type=Path, help="directory of the runs (default: runs/STUDY)")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the study's")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="instead of all variants")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="to try out: no results are written")
    options = parser.parse_intermixed_args(arguments)
    study, folder = STUDIES[options.study], (options.runs or Path("runs", options.study)).resolve()
    names, seeds = options.only or list(study.variants), options.seeds or study.seeds
    todo = [(name, seed) for seed in seeds for name in names]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(lambda item: play(study, item[0], item[1], folder, options.overrides), todo))
    rows = [{"variant": name, **row(run)} for (name, _), run in zip(todo, runs, strict=True)]
    print("\n".join(table(rows)))
    if not options.overrides:
        result = {"machine": machine(), "jobs": options.jobs, "common": study.common, "variants": study.variants}
        stem = options.study.replace("-", "_")
        (RESULTS / f"{stem}.json").write_text(json.dumps({**result, "runs": rows}, indent=2) + "\n")
        if len(seeds) > 1 and not study.perturbed:
            picture = ROOT / "docs" / "images" / f"{stem}.png"
            command = [*TREADLE, "plot", *map(str, runs), "--output", str(picture)]
            command += ["--labels", *names] if len(names) > 1 else []
            subprocess.run(command, cwd=ROOT, check=True)


def play(study: Study, variant: str, seed: int, folder: Path, overrides: Sequence[str]) -> Path:
    """Return the directory of a complete run, made if it is missing; `peak.json` in it has the peak resident memory.

    The peak of a run that was resumed is that of its last process.
    """
    name = f"{variant.replace(' ', '-')}-seed{seed}"
    run = folder / name
    if not (run / "summary.json").is_file():
        how = ["--resume"] if run.is_dir() else [f"seed={seed}", *study.common, *study.variants[variant], *overrides]
        if variant in study.perturbed and not run.is_dir():
            start = perturbed(study, seed, study.perturbed[variant], folder)
            how += [f"model.path={start}", "model.build=null", "warm_start=null"]
        command = [*TREADLE, "train", study.recipe, *how, "--runs", str(folder), "--name", name]
        cache = {"TREADLE_CACHE": str(folder / f"cache-{seed}")} if study.fresh else {}
        _, status, usage = os.wait4(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **cache}).pid, 0)
        if run.is_dir():
            (run / "peak.json").write_text(json.dumps(usage.ru_maxrss * 1024))
        if status:
            raise SystemExit(os.waitstatus_to_exitcode(status))
    return run


def perturbed(study: Study, seed: int, draw: int, folder: Path) -> Path:
    """Return a model directory: the recipe's warm start, each weight times 1 + 1e-7 x a standard normal number."""
    warm, directory = folder / f"warm-{seed}", folder / f"perturbed-{seed}-{draw}"
    if not warm.is_dir():
        command = [*TREADLE, "sft", study.recipe, f"seed={seed}", *study.common, "--out", str(warm)]
        subprocess.run(command, cwd=ROOT, check=True)
    if not directory.is_dir():
        shutil.copytree(warm, directory, ignore=shutil.ignore_patterns("SHA256SUMS"))
        generator = torch.Generator().manual_seed(draw)
        weights = load_file(warm / "model.safetensors")
        for name, weight in weights.items():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weights[name] = (weight.double() * (1 + 1e-7 * noise)).to(weight.dtype)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def row(run: Path) -> dict[str, Any]:
    """Return the figures of one run. kinds: of held-out tasks, with the lower bound of the lift of each."""
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if line["kind"] == "update"]
    sampled = [e for e in summary["evaluations"] if e["temperature"] > 0]
    if sampled:
        first, last, number = sampled[0]["by"], sampled[-1]["by"], sampled[0]["by_tasks"]
        kinds = {kind: lift(first[kind], last[kind], number[kind], number[kind]) for kind in first}
        before, after = summary["held_out_success_before"], summary["held_out_success_after"]
    else:
        (before, first), (after, last) = _share(updates[:ENDS]), _share(updates[-ENDS:])
        kinds = {"trained": lift(before, after, first, last)}
        before, after = kinds["trained"]["before"], kinds["trained"]["after"]
    return {
        "seed": summary["seed"],
        "before": before,
        "after": after,
        "kinds": kinds,
        "training_success": [line["success"] for line in updates],
        "warm_start_loss": (summary.get("warm_start") or {}).get("loss"),
        "updates": summary["updates"],
        "curve": curve(run, sampled),
        "held_out_tasks": summary.get("held_out_tasks"),
        "wall_seconds": summary["wall_seconds"],
        "cpu_seconds": summary["cpu_seconds"],
        "peak_bytes": json.loads(peak.read_text()) if (peak := run / "peak.json").is_file() else None,
        "weights_sha256": summary["weights_sha256"],
    }


def curve(run: Path, evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return each evaluation's update, success and tokens sampled for training until then, without replayed ones."""
    query = """
        SELECT g.trained_version + 1, sum(s.completion_tokens) FROM steps s
        JOIN trajectories USING (trajectory_id) JOIN groups g USING (group_id)
        WHERE g.trained_version IS NOT NULL AND s.reason IS NOT 'replayed' GROUP BY 1"""
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        tokens = dict(db.execute(query))
    return [
        {
            "update": each["update"],
            "success": each["success"],
            "sampled_tokens": sum(count for update, count in tokens.items() if update <= each["update"]),
        }
        for each in evaluations
    ]


def _share(updates: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Yield the success over some updates, and of how many attempts it is."""
    counts = [line["trajectories"] - line["failed"] for line in updates]
    yield sum(line["success"] * count for line, count in zip(updates, counts, strict=True)) / sum(counts)
    yield sum(counts)


def lift(before: float, after: float, tasks_before: float, tasks_after: float) -> dict[str, float]:
    """Return two shares, each of so many tasks, and the lower 95% bound of their difference."""
    half = 1.96 * math.sqrt(before * (1 - before) / tasks_before + after * (1 - after) / tasks_after)
    return {"tasks": tasks_before, "before": before, "after": after, "lift_at_least": after - before - half}


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table of the runs, and a line on each variant that has several seeds."""
    kinds = list(rows[0]["kinds"])
    head = ["", "seed", *kinds, "all", *(f"lift at least, {kind}" for kind in kinds), "to .9", "tokens", "min", "GiB"]
    yield from ("| " + " | ".join(head) + " |", "|" + "---|" * len(head))
    for r in rows:
        cells = [r["variant"], str(r["seed"])]
        cells += [f"{share['before']:.3f} → {share['after']:.3f}" for share in (*r["kinds"].values(), r)]
        cells += [f"{kind['lift_at_least']:.3f}" for kind in r["kinds"].values()]
        there = next((each for each in r["curve"] if each["success"] >= HIGH), None)
        cells += ["", ""] if there is None else [f"{there['update']}", f"{there['sampled_tokens']:,}"]
        peak = f"{r['peak_bytes'] / 2**30:.1f}" if r["peak_bytes"] else ""
        yield "| " + " | ".join([*cells, f"{r['wall_seconds'] / 60:.0f}", peak]) + " |"
    for variant in dict.fromkeys(r["variant"] for r in rows):
        lifts = np.array([r["after"] - r["before"] for r in rows if r["variant"] == variant])
        if len(lifts) in T_95:
            half = T_95[len(lifts)] * lifts.std(ddof=1) / math.sqrt(len(lifts))
            yield f"{variant}: mean lift {lifts.mean():.3f}, its lower 95% bound {lifts.mean() - half:.3f}"


if __name__ == "__main__":
    main()
