"""Progress on a terminal: a live line while things run, plain lines where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from rich import progress as bar

from treadle.cli.console import Console
from treadle.core.text import escape_line
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.callbacks import PlainProgress, Progress, evaluation_lines, update_line
from treadle.orchestration.reporting.metrics import EvaluationResult, shown

_EVERY = 10  # updates between lines that stay; the bar shows each
_WIDE = 110  # columns from which both times and a longer bar fit beside the figures


@contextmanager
def make_progress(config: RunConfig, stderr: bool = False) -> Iterator[Progress]:
    """Yield live progress on a terminal, else plain lines; on standard error for commands that print a result."""
    console, shows = Console(stderr), (config.orchestration.updates, config.data.table_by)
    if console.is_terminal:
        with make_bars(console) as bars:
            yield LiveProgress(console, bars, *shows)
    else:
        with redirect_stdout(sys.stderr) if stderr else nullcontext():  # PlainProgress prints
            yield PlainProgress(*shows)


def make_bars(console: Console) -> bar.Progress:
    """Return progress bars that vanish when they are done."""
    wide = console.width >= _WIDE
    columns: list[bar.ProgressColumn] = [
        bar.SpinnerColumn(),
        bar.TextColumn("{task.description}", markup=False),
        bar.BarColumn(bar_width=24 if wide else 10),
        bar.MofNCompleteColumn(),
        *([bar.TimeElapsedColumn()] if wide else []),
        bar.TimeRemainingColumn(compact=True),
        bar.TextColumn("{task.fields[note]}", markup=False),
    ]
    return bar.Progress(*columns, console=console.rich, transient=True, refresh_per_second=5)


class LiveProgress(Progress):
    """Shows two bars, the run's updates and the current phase; every tenth update's figures stay as a line."""

    def __init__(self, console: Console, bars: bar.Progress, updates: int, table_by: str | None = None) -> None:
        self._console, self._bars, self._updates, self._table_by = console, bars, updates, table_by
        self._run = bars.add_task("updates", total=updates, note="", visible=False)
        self._phase = bars.add_task("loading", total=None, note="")  # libraries and model, until a phase begins

    def log(self, line: str) -> None:
        self._console.line(line)

    def phase(self, name: str, done: int, total: int, note: str = "") -> None:
        if done == 0:
            self._bars.reset(self._phase, total=total, description=escape_line(name), visible=True, note="")
        else:
            self._bars.update(self._phase, completed=done, note=escape_line(note))

    def update(self, row: Mapping[str, Any]) -> None:
        note = f"reward {shown(row['reward_mean'])}  success {shown(row['success'])}"
        self._bars.update(self._run, completed=row["update"], note=note, visible=True)
        if row["update"] % _EVERY == 0 or row["update"] in (1, self._updates) or row["failed"]:
            self._console.line(update_line(row, self._updates, self._console.width))

    def evaluate(self, result: EvaluationResult) -> None:
        for line in evaluation_lines(result, self._table_by, self._console.width):
            self._console.line(line, style="bold")
