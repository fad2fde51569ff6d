"""Progress on a terminal: a live line while things run, plain lines where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from treadle.cli.console import Console
from treadle.core.text import escape_line
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.metrics import EvaluationResult, shown
from treadle.orchestration.reporting.progress import PlainProgress, Progress, evaluation_lines, update_line

_EVERY = 10  # updates between lines that stay; the bar shows each
_WIDE = 110  # columns from which both times and a longer bar fit beside the figures


@contextmanager
def make_progress(config: RunConfig, stderr: bool = False) -> Iterator[Progress]:
    """Yield live progress on a terminal, else plain lines; on standard error for commands that print a result."""
    console, table_by = Console(stderr), config.data.table_by
    if console.is_terminal:
        with make_bars(console) as bars:
            yield LiveProgress(console, bars, config.orchestration.updates, table_by)
    else:
        with redirect_stdout(sys.stderr) if stderr else nullcontext():  # PlainProgress prints
            yield PlainProgress(table_by)


def make_bars(console: Console) -> Bars:
    """Return progress bars that vanish when they are done."""
    wide = console.width >= _WIDE
    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24 if wide else 10),
        MofNCompleteColumn(),
        *([TimeElapsedColumn()] if wide else []),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    return Bars(*columns, console=console.rich, transient=True, refresh_per_second=5)


class LiveProgress:
    """Shows two bars, the run's updates and the current phase; every tenth update's figures stay as a line."""

    def __init__(self, console: Console, bars: Bars, updates: int, table_by: str | None = None) -> None:
        self._console, self._bars, self._table_by = console, bars, table_by
        self._run = bars.add_task("updates", total=updates, note="", visible=False)
        self._phase = bars.add_task("loading", total=None, note="")  # libraries and model, until a phase begins

    def log(self, line: str) -> None:
        """Print a line above the bars."""
        self._console.line(line)

    def phase(self, name: str, total: int) -> None:
        """Reset the phase's bar for a new phase."""
        self._bars.reset(self._phase, total=total, description=escape_line(name), visible=True, note="")

    def advance(self, done: int, note: str = "") -> None:
        self._bars.update(self._phase, completed=done, note=escape_line(note))

    def updated(self, row: Mapping[str, Any], updates: int) -> None:
        """Move the run's bar, and print the line of each tenth update, the first, the last, and any with failures."""
        note = f"reward {shown(row['reward_mean'])}  success {shown(row['success'])}"
        self._bars.update(self._run, completed=row["update"], total=updates, note=note, visible=True)
        if row["update"] % _EVERY == 0 or row["update"] in (1, updates) or row["failed"]:
            self._console.line(update_line(row, updates, self._console.width))

    def evaluated(self, result: EvaluationResult) -> None:
        for line in evaluation_lines(result, self._table_by, self._console.width):
            self._console.line(line, style="bold")
