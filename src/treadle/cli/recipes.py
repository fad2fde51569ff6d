"""`treadle recipes`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import rich.table

from treadle.cli.console import Console, Table
from treadle.cli.options import Commands, add_command, add_recipe
from treadle.core.config import REQUIRED, FieldLine, as_override, describe, describe_sections, dump_yaml
from treadle.orchestration.config import RunConfig, load_recipe, recipe_names

_EXAMPLES = """examples:
  treadle recipes                                        the shipped recipes
  treadle recipes show demo                              every value of one, with what it means
  treadle recipes show demo training.group_size=16       ... as `treadle train` would resolve it
  treadle recipes show demo --yaml > mine.yaml           a recipe of your own to start from
"""
_HEADING = "bold underline"
_WIDE = 110  # columns of a terminal from which full paths, values and their help stand beside each other
_NAMES, _VALUES = 30, 24  # columns up to values where they follow names alone; columns of values beside their help


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
    """Print every resolved value of a recipe; with --yaml as a recipe."""
    config = load_recipe(options.recipe, options.overrides)
    console = Console()
    if options.yaml:
        console.verbatim(dump_yaml(config))
        return 0
    _print_listing(console, config, [override.partition("=")[0] for override in options.overrides])
    return 0


class _Entry(NamedTuple):
    """Holds a line: `_Entry("*", "training.group_size", "16", "trajectories ...", "bold")`; a heading has no value."""

    mark: str
    name: str
    value: str
    help: str
    style: str


def _print_listing(console: Console, config: RunConfig, overridden: Sequence[str]) -> None:
    """Print each section's heading, then its own values: mark, path, value, help, and the default if it is another.

    overridden: paths set on the command line. On a narrow terminal help stands below the values, and names take the
    place of paths below the headings.
    """
    if console.is_terminal and console.width < _WIDE:
        _print_stacked(console, _entries(config, overridden, with_paths=False))
    else:
        _print_columns(console, _entries(config, overridden, with_paths=True))
    console.line()
    console.line("* set by the recipe, + on the command line; the others are defaults", style="dim", wrap=True)


def _print_columns(console: Console, entries: Iterator[_Entry]) -> None:
    grid = rich.table.Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold", max_width=_VALUES if console.is_terminal else None)
    grid.add_column(style="dim")
    table = Table(grid)
    for entry in entries:
        if entry.style == _HEADING:
            table.add_row()
        table.add_row(entry.mark, (entry.name, entry.style), (entry.value, entry.style), entry.help)
    console.table(table)


def _print_stacked(console: Console, entries: Iterator[_Entry]) -> None:
    for mark, name, value, help_text, style in entries:
        if style == _HEADING:
            console.line()
            console.line("  ", (name, style), ("  " + help_text, "dim"), wrap=True)
            continue
        first, *rest = textwrap.wrap(value, console.width - _NAMES) or [""]
        console.line(f"{mark or ' '} ", (f"{name:<{_NAMES - 3}} {first}".rstrip(), style))
        for line in rest:
            console.line(" " * _NAMES, (line, style))
        for line in textwrap.wrap(help_text, console.width - 6):
            console.line("      ", (line, "dim"))


def _entries(config: RunConfig, overridden: Sequence[str], with_paths: bool) -> Iterator[_Entry]:
    """Yield each section's heading and own values. Nested plain data (model.build) is listed below its key."""
    lines = describe(config)
    for section, meaning in {"": "", **describe_sections(config)}.items():
        if section:
            yield _Entry("", section, "", meaning, _HEADING)
        for line in lines:
            parent, _, name = line.path.rpartition(".")
            if parent == section:
                shown = line.path if with_paths else ("  " if section else "") + name
                yield from _values(line, shown, "  " if with_paths else "    ", overridden)


def _values(line: FieldLine, shown: str, indent: str, overridden: Sequence[str]) -> Iterator[_Entry]:
    """Yield one setting, and the values nested in it."""
    style = "" if line.is_default else "bold"
    nested = line.value if isinstance(line.value, dict) else {}
    differs = not line.is_default and line.default is not REQUIRED
    help_text = f"{line.help} (default: {as_override(line.default)})" if differs else line.help
    mark = "+" if _is_below(line.path, overridden) else "" if line.is_default else "*"
    yield _Entry(mark, shown, "" if nested else as_override(line.value), help_text, style)
    for key, value in nested.items():
        own = "+" if _is_below(f"{line.path}.{key}", overridden) else ""
        yield _Entry(own, f"{indent}.{key}", as_override(value), "", style)


def _is_below(path: str, overridden: Sequence[str]) -> bool:
    """Return whether an override set this path, something below it or above it."""
    return any(f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.") for other in overridden)
