"""Progress on a terminal: a live line while things run, plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from treadle.orchestration.metrics import EvaluationResult
from treadle.orchestration.progress import PlainProgress, Progress, evaluation_line, update_line


@contextmanager
def make_progress(updates: int) -> Iterator[Progress]:
    """The progress that fits where standard output goes."""
    console = Console()
    if not console.is_terminal:
        yield PlainProgress()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
    )
    times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Bars(*columns, *times, console=console, transient=True, refresh_per_second=5) as bars:
        yield LiveProgress(bars, updates)


class LiveProgress:
    """Two bars, the run's updates and the current phase; every tenth update's figures stay as a line."""

    def __init__(self, bars: Bars, updates: int) -> None:
        self._bars = bars
        self._run = bars.add_task("updates", total=updates, note="", visible=False)
        self._phase = bars.add_task("", total=1, note="", visible=False)

    def say(self, line: str) -> None:
        """Print above the bars."""
        self._bars.console.print(line, markup=False, highlight=False)

    def phase(self, name: str, total: int) -> None:
        """Start the phase's bar anew."""
        self._bars.reset(self._phase, total=total, description=name, visible=True, note="")

    def advance(self, done: int, note: str = "") -> None:
        """Move the phase's bar."""
        self._bars.update(self._phase, completed=done, note=note)

    def updated(self, row: Mapping[str, Any], updates: int) -> None:
        """Move the run's bar."""
        note = f"reward {row['reward_mean']:.3f}  success {row['success']:.3f}"
        self._bars.update(self._run, completed=row["update"], total=updates, note=note, visible=True)
        if row["update"] % 10 == 0 or row["update"] in (1, updates) or row["failed"]:
            self.say(update_line(row, updates))

    def evaluated(self, result: EvaluationResult) -> None:
        """Print the result."""
        self._bars.console.print(evaluation_line(result), markup=False, highlight=False, style="bold")
