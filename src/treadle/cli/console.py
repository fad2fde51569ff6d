"""Where commands print: coloured and fitted to a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

_PLAIN_WIDTH = 1000  # a pipe has no width: tables are as wide as what they hold


def make_console(stderr: bool = False) -> Console:
    """A console that takes text as it is: no markup, no emoji codes, no guessed colours."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def make_table(*columns: str, title: str | None = None, text: tuple[str, ...] = ()) -> Table:
    """A table in the house style. Columns are figures, aligned right, but for those named in `text`."""
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    table.show_edge, table.padding = False, (0, 1, 0, 0)
    for name in columns:
        left = name in text
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print it; without a terminal, without the blanks that fill its lines."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    console.print("\n".join(line.rstrip() for line in capture.get().splitlines()), soft_wrap=True)
