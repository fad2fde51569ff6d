"""`treadle plot`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.console import Console
from treadle.cli.options import Commands, add_command
from treadle.core.errors import ConfigError, DamageError, RunError

if TYPE_CHECKING:
    from treadle.orchestration.reporting.curve import RunGroup, RunMetrics

_EXAMPLES = """examples:
  treadle plot runs/demo                                   one run, also while it goes on
  treadle plot runs/demo-seed*                             one line with a band over seeds
  treadle plot runs/chain-* runs/tree-* --output both.pdf  one line each: they differ in more than the seed

Runs that differ only in the seed are one line: their mean, in a band from lowest to highest. Others get lines of their
own, labeled by the keys that differ. Panels: training reward, held-out success (all tasks, and by `data.table_by`),
completion tokens and steps.
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "plot", run, "draw the learning curves of one or several runs", _EXAMPLES)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory, finished or not")
    parser.add_argument(
        "--output", type=Path, default=Path("plot.png"), metavar="FILE", help=".png, .pdf or .svg (default: plot.png)"
    )


def run(options: argparse.Namespace) -> int:
    """Draw the runs, and print which of them are one line; returns 0."""
    from treadle.orchestration.reporting.curve import FORMATS, draw_runs

    output = options.output
    if output.suffix not in FORMATS:
        raise ConfigError(f"--output {str(output)!r} must end in one of {', '.join(FORMATS)}")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {str(output)!r}: no directory {str(output.parent)!r}; create it first")
    paths = list({path.resolve(): path for path in options.runs}.values())
    groups = draw_runs([read_run(path) for path in paths], output)
    console = Console()
    for group in groups:
        console.line(_line(group))
    console.line(("picture  ", "bold"), str(output))
    return 0


def read_run(path: Path) -> RunMetrics:
    """Return what is drawn of a run; damaged lines of its metrics are left out, and named on standard error.

    Raises RunError if there is no run, or nothing to draw yet; DamageError if none of its metrics can be read.
    """
    from treadle.orchestration.reporting.curve import RunMetrics
    from treadle.orchestration.store.run_directory import RunDirectory

    directory = RunDirectory.open(path)
    log = directory.metrics_log()
    run = RunMetrics(directory.config(), log.rows)
    problem = log.problem(run.updates)
    if not run.updates:
        if problem:
            raise DamageError(f"run {str(path)!r}: {problem}; restore it, or leave the run out")
        raise RunError(f"run {str(path)!r} has no updates yet; plot it after its first update, or leave it out")
    if problem:
        Console(stderr=True).line(f"warning: run {str(path)!r}: {problem}; left out of the picture")
    return run


def _line(group: RunGroup) -> str:
    """Return `training.packing=tree: seeds 0, 1, 2, 45 updates`."""
    seeds, updates = [run.config.seed for run in group.runs], sorted({run.updates for run in group.runs})
    label = group.label or group.runs[0].config.recipe
    ends = f"{updates[0]} updates"
    if len(updates) > 1:
        ends += f", where the shortest run ends (the longest has {updates[-1]})"
    return f"{label}: seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, {ends}"
