"""`treadle recipes`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import rich.table

from treadle.cli.console import Console, Table
from treadle.cli.options import Commands, add_command, add_recipe
from treadle.core.config import REQUIRED, FieldLine, describe, describe_sections, dump_yaml
from treadle.orchestration.config import RunConfig, load_recipe, recipe_names

_EXAMPLES = """examples:
  treadle recipes                                        the shipped recipes
  treadle recipes show demo                              every value of one, with what it means
  treadle recipes show demo training.group_size=16       ... as `treadle train` would resolve it
  treadle recipes show demo --yaml > mine.yaml           a recipe of your own to start from
"""
_WIDE = 110  # columns that full paths leave enough room beside them for the help


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "recipes", run, "list the shipped recipes, or show what one resolves to", _EXAMPLES)
    below = parser.add_subparsers(metavar="show")
    show = add_command(below, "show", run_show, "show every resolved value of a recipe", _EXAMPLES)
    add_recipe(show)
    show.add_argument("--yaml", action="store_true", help="print YAML that is itself a recipe")


def run(options: argparse.Namespace) -> int:
    """List the shipped recipes."""
    table = Table(rich.table.Table.grid(padding=(0, 2)))
    for name in recipe_names():
        table.add_row((name, "bold"), load_recipe(name).about)
    console = Console()
    console.table(table)
    if console.is_terminal:
        console.line()
        console.line("treadle recipes show NAME   every value of one", style="dim")
        console.line("treadle train NAME          train it", style="dim")
    return 0


def run_show(options: argparse.Namespace) -> int:
    """Print one recipe."""
    config = load_recipe(options.recipe, options.overrides)
    console = Console()
    if options.yaml:
        console.verbatim(dump_yaml(config))
        return 0
    _print_listing(console, config, [override.partition("=")[0] for override in options.overrides])
    return 0


def _print_listing(console: Console, config: RunConfig, overridden: Sequence[str]) -> None:
    """A heading for each section, then its own values, one a line: mark, path, value, help, and the default if it is
    another.

    overridden: paths set on the command line. Nested plain data (model.build) is opened up below its key. A narrow
    terminal has names instead of paths below the headings.
    """
    narrow, lines = console.width < _WIDE, describe(config)
    grid = rich.table.Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", max_width=(24 if narrow else 40) if console.is_terminal else None)
    grid.add_column(style="dim")
    table = Table(grid)
    for section, meaning in {"": "", **describe_sections(config)}.items():
        if section:
            table.add_row()
            table.add_row("", (section, "bold underline"), "", meaning)
        for line in lines:
            parent, _, name = line.path.rpartition(".")
            if parent == section:
                _add_value(table, line, ("  " if section else "") + name if narrow else line.path, narrow, overridden)
    console.table(table)
    console.line()
    console.line("* set by the recipe, + on the command line; the others are defaults", style="dim", wrap=True)


def _add_value(table: Table, line: FieldLine, shown: str, narrow: bool, overridden: Sequence[str]) -> None:
    style = "" if line.is_default else "bold"
    nested = line.value if isinstance(line.value, dict) else {}
    differs = not line.is_default and line.default is not REQUIRED
    help_text = f"{line.help} (default: {_plain(line.default)})" if differs else line.help
    mark = "+" if _is_below(line.path, overridden) else "" if line.is_default else "*"
    table.add_row(mark, (shown, style), ("" if nested else _plain(line.value), style), help_text)
    for key, value in nested.items():
        own = "+" if _is_below(f"{line.path}.{key}", overridden) else ""
        table.add_row(own, (f"    .{key}" if narrow else f"  .{key}", style), (_plain(value), style))


def _is_below(path: str, overridden: Sequence[str]) -> bool:
    """Whether an override set this, a part of it, or what it is a part of."""
    return any(f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.") for other in overridden)


def _plain(value: Any) -> str:
    """The value as one would write it in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    return str(value) or '""'
