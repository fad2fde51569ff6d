"""What a finished run shows: before and after, in figures and in one readable trajectory each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from treadle.cli.transcript import print_transcript
from treadle.orchestration.config import RunConfig
from treadle.orchestration.ledger import Ledger


def print_result(summary: dict[str, Any], path: Path, config: RunConfig) -> None:
    """Tables, two transcripts, and where everything is."""
    console = Console()
    results = summary["evaluations"]
    if results:
        console.print(before_after_table(results, config))
        _print_transcripts(console, path, results, config)
    console.print(
        f"\nrun        {path}",
        f"curve      {path / 'curve.png'}",
        f"summary    {path / 'summary.json'}",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"time       {summary['wall_seconds']:.0f} s, {summary['cpu_seconds']:.0f} CPU s", highlight=False)
    console.print(f"weights    sha256 {summary['weights_sha256']}", highlight=False, soft_wrap=True)


def before_after_table(results: list[dict[str, Any]], config: RunConfig) -> Table:
    """Held-out success before and after training, sampled and greedy, by the configured key."""
    table = Table(title=f"held-out success, {results[0]['tasks']} tasks", title_style="bold")
    table.add_column(config.data.table_by or "")
    columns: list[dict[str, Any]] = []
    for temperature in dict.fromkeys(r["temperature"] for r in results):
        own = [r for r in results if r["temperature"] == temperature]
        how = "greedy" if temperature == 0 else f"T={temperature:g}"
        for when, result in (("before", own[0]), ("after", own[-1])):
            table.add_column(f"{when}, {how}", justify="right")
            columns.append(result)
    for key in results[0]["by"]:
        table.add_row(key, *(f"{c['by'].get(key, float('nan')):.3f}" for c in columns))
    table.add_row("all", *(f"{c['success']:.3f}" for c in columns), style="bold")
    return table


def _print_transcripts(console: Console, path: Path, results: list[dict[str, Any]], config: RunConfig) -> None:
    """The first held-out task that training turned from failure to success, played before and after."""
    first, last = f"e{results[0]['update']:06d}-%", f"e{results[-1]['update']:06d}-%"
    ledger = Ledger(path / "ledger.sqlite", read_only=True)
    pairs = ledger.query(
        "SELECT b.trajectory_id AS before, a.trajectory_id AS after FROM trajectories b JOIN groups gb USING (group_id) "
        "JOIN groups ga ON ga.position = gb.position JOIN trajectories a ON a.group_id = ga.group_id "
        "WHERE gb.group_id LIKE ? AND ga.group_id LIKE ? ORDER BY a.reward < ?, b.reward >= ?, gb.position LIMIT 1",
        *(first, last, config.evaluation.success_at, config.evaluation.success_at),
    )
    ledger.close()
    for pair in pairs:
        for when in ("before", "after"):
            console.print(
                f"\n[bold]{when} training[/bold]  (treadle show {path} {pair[when]})",
                highlight=False,
                soft_wrap=True,
            )
            print_transcript(console, path, pair[when])
