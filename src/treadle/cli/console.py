"""Output of commands: colored and fitted to a terminal, plain lines elsewhere, control sequences always escaped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import rich.console
import rich.live
import rich.table
from rich import box
from rich import progress as bar
from rich.text import Text

from treadle.core.text import escape_line, escape_text
from treadle.plan.config import RunConfig
from treadle.report.metrics import EvaluationResult, shown
from treadle.report.progress import EVERY, PlainProgress, Progress, evaluation_lines, update_line

_PLAIN_WIDTH = 1000  # a pipe has no width: tables are as wide as their contents
Part = str | tuple[str, str]  # some text; or some text and its style


class Table:
    """Table with escaped cells, one line each."""

    def __init__(self, rich_table: rich.table.Table) -> None:
        self.rich = rich_table

    def add_row(self, *cells: Part, style: str = "") -> None:
        """Add a row; without cells, a blank line."""
        self.rich.add_row(*(_styled(escape_line, [cell]) for cell in cells), style=style)


class Console:
    """Standard output or standard error. Takes plain text, also models' and tasks'; escapes terminal control codes."""

    def __init__(self, stderr: bool = False) -> None:
        self._stderr = stderr
        self.rich = rich.console.Console(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.rich.is_terminal:
            self.rich.width = _PLAIN_WIDTH

    @property
    def is_terminal(self) -> bool:
        return self.rich.is_terminal

    @property
    def width(self) -> int:
        return self.rich.width

    def line(self, *parts: Part, style: str = "", wrap: bool = False) -> None:
        """Print one line, from parts in their own styles. Long lines are not wrapped, so that paths can be copied;
        with `wrap` they wrap at words."""
        self.rich.print(_styled(escape_line, parts), style=style, soft_wrap=not wrap)

    def text(self, *parts: Part, style: str = "") -> None:
        self.rich.print(_styled(escape_text, parts), style=style, soft_wrap=True)

    def table(self, table: Table) -> None:
        """Print a table; without a terminal, without trailing blanks."""
        if self.is_terminal:
            self.rich.print(table.rich)
            return
        with self.rich.capture() as capture:
            self.rich.print(table.rich)
        self.rich.print("\n".join(line.rstrip() for line in capture.get().splitlines()), soft_wrap=True)

    @contextmanager
    def live(self) -> Iterator[Callable[[Sequence[str | Table]], None]]:
        """Yield a function that shows lines and tables, on a terminal replacing the previous ones, until the end."""

        def show(parts: Sequence[str | Table]) -> None:
            shown = (_styled(escape_line, [part]) if isinstance(part, str) else part.rich for part in parts)
            display.update(rich.console.Group(*shown), refresh=True)

        with rich.live.Live(console=self.rich, auto_refresh=False, transient=True) as display:
            yield show

    def json(self, data: Any, indent: int | None = 2) -> None:
        """Print data as JSON in ASCII, never coloured or wrapped; JSON's own escaping suffices."""
        self.verbatim(json.dumps(data, indent=indent).replace("\x7f", "\\u007f") + "\n")

    def verbatim(self, text: str) -> None:
        """Print text for a program verbatim; the caller escapes it."""
        (sys.stderr if self._stderr else sys.stdout).write(text)


def indented(text: str) -> str:
    """Indent lines by two columns, so that none can imitate the command's own output."""
    return "".join(f"  {line}\n" for line in text.strip("\n").split("\n"))


def make_table(*columns: str, title: str | None = None, text: Sequence[str] = ()) -> Table:
    """Return an empty table. Columns are figures, aligned right, except those named in `text`."""
    shown = None if title is None else escape_line(title)
    table = rich.table.Table(title=shown, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    table.show_edge, table.padding = False, (0, 1, 0, 0)
    for name in columns:
        wraps = name in text
        table.add_column(escape_line(name), justify="left" if wraps else "right", overflow="fold", no_wrap=not wraps)
    return Table(table)


def _styled(escape: Callable[[str], str], parts: Sequence[Part]) -> Text:
    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((escape(text), style) for text, style in pairs))


_WIDE = 110  # minimum width for both times and a longer bar beside the figures


@contextmanager
def make_progress(config: RunConfig, stderr: bool = False) -> Iterator[Progress]:
    """Yield live progress on a terminal, otherwise plain lines; on standard error for commands that print a result."""
    console, shows = Console(stderr), (config.orchestration.updates, config.data.table_by)
    if console.is_terminal:
        with make_bars(console) as bars:
            yield LiveProgress(console, bars, *shows)
    else:
        with redirect_stdout(sys.stderr) if stderr else nullcontext():  # PlainProgress prints
            yield PlainProgress(*shows)


def make_bars(console: Console) -> bar.Progress:
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
    """Shows two bars, the run's updates and the current phase; every tenth update's figures remain as a line."""

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
        if row["update"] % EVERY == 0 or row["update"] in (1, self._updates) or row["failed"]:
            self._console.line(update_line(row, self._updates, self._console.width))

    def evaluate(self, result: EvaluationResult) -> None:
        for line in evaluation_lines(result, self._table_by, self._console.width):
            self._console.line(line, style="bold")
