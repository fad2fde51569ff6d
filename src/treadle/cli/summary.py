"""What a finished run prints: results before and after training, and one readable trajectory of each."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from treadle.cli.console import Console, Part, Table, make_table
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.metrics import shown
from treadle.orchestration.store.rollout_store import decoder, load_run_tokenizer, load_trajectory, step_relations
from treadle.orchestration.store.run_directory import RunDirectory


def print_result(summary: dict[str, Any], path: Path, config: RunConfig) -> None:
    """Print a finished run's held-out results, two transcripts, and where everything is."""
    console = Console()
    results = summary["evaluations"]
    if results:
        console.line()
        console.table(before_after_table(results, config))
        _print_transcripts(console, path, results, config)
    quoted = shlex.quote(str(path))
    console.line()
    for name, value in (
        ("run", str(path)),
        ("curve", str(path / "curve.png")),
        ("summary", str(path / "summary.json")),
        ("time", f"{summary['wall_seconds']:.0f} s, {summary['cpu_seconds']:.0f} CPU s"),
        ("weights", f"sha256 {summary['weights_sha256']}"),
        ("more", f"treadle report {quoted}   (and: show, eval)"),
    ):
        console.line((f"{name:<9}", "bold"), value)


def before_after_table(results: list[dict[str, Any]], config: RunConfig) -> Table:
    """Return a table of held-out success before and after training, sampled and greedy, by `data.table_by`."""
    first = config.data.table_by or "tasks"
    columns: dict[str, dict[str, Any]] = {}
    for temperature in dict.fromkeys(r["temperature"] for r in results):
        same = [r for r in results if r["temperature"] == temperature]
        how = "greedy" if temperature == 0 else f"T={temperature:g}"
        columns |= {f"before, {how}": same[0], f"after, {how}": same[-1]}
    table = make_table(first, *columns, title=f"held-out success, {results[0]['tasks']} tasks", text=(first,))
    for key in results[0]["by"]:
        table.add_row(key, *(shown(c["by"].get(key)) for c in columns.values()))
    table.add_row("all", *(shown(c["success"]) for c in columns.values()), style="bold")
    if any(c["failed"] for c in columns.values()):
        table.add_row("failed", *(str(c["failed"]) for c in columns.values()), style="red")
    return table


def _print_transcripts(console: Console, path: Path, results: list[dict[str, Any]], config: RunConfig) -> None:
    """Print attempts at one held-out task before and after training, from failure to success if there is one.

    They are sampled ones, or greedy ones where evaluations are greedy.
    """
    sampled = [r for r in results if r["temperature"] == results[0]["temperature"]]
    mark = "g" if results[0]["temperature"] == 0 else ""
    first, last = (f"e{result['update']:06d}{mark}" for result in (sampled[0], sampled[-1]))
    section = config.evaluation
    pair = RunDirectory(path).ledger().before_and_after(first, last, section.success_at, section.success_of)
    for when, trajectory in zip(("before", "after"), pair or (), strict=False):
        console.line()
        console.line((f"{when} training", "bold"), f"   treadle show {shlex.quote(str(path))} {trajectory}")
        print_transcript(console, path, trajectory)


def ending(row: dict[str, Any]) -> str:
    """Return `reward 1, done`, or `no reward, failed: environment: step raised ...`."""
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
    failure = f": {row['failure_cause']}: {row['failure_message']}" if row["failure_cause"] else ""
    return f"{reward}, {row['status']}{failure}"


def print_transcript(console: Console, run: Path, trajectory_id: str) -> None:
    """Print what the model read (dim) and wrote (bold), and how the trajectory ended."""
    row, steps = load_trajectory(run, trajectory_id)
    decode = decoder(load_run_tokenizer(run))
    parts: list[Part] = []
    for step, relation in zip(steps, step_relations(steps, decode), strict=True):
        parts += [(decode(step.prompt_ids[relation.shared :]), "dim"), (decode(step.completion_ids), "bold cyan")]
    console.text(*parts)
    console.line(f"-> {ending(row)}, {len(steps)} step{'s' if len(steps) != 1 else ''}", style="bold")
