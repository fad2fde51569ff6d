"""`treadle recipes`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import rich.table

from treadle.cli.console import Console, Table
from treadle.cli.options import Commands, add_command, add_recipe
from treadle.core.config import REQUIRED, as_override, describe, describe_sections, dump_yaml
from treadle.orchestration.config import RunConfig, load_recipe, recipe_names

_EXAMPLES = """examples:
  treadle recipes                                        the shipped recipes
  treadle recipes show demo                              every value of one, with what it means
  treadle recipes show demo --yaml > mine.yaml           a recipe of your own to start from
"""


def add_parser(commands: Commands) -> None:
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


def _print_listing(console: Console, config: RunConfig, overridden: Sequence[str]) -> None:
    """Print each section's heading, then its own values: mark, path, value, help, and the default if it is another.

    overridden: paths set on the command line.
    """
    grid = rich.table.Table.grid(padding=(0, 1))
    for style in ("", "", "", "dim"):
        grid.add_column(style=style, overflow="fold", no_wrap=not console.is_terminal)
    table, lines = Table(grid), describe(config)

    def add_row(path: str, value: str, text: str, is_default: bool) -> None:
        style = "" if is_default else "bold"
        mark = "+" if _is_below(path, overridden) else "" if is_default else "*"
        table.add_row(mark, (path, style), (value, style), text)

    for section, meaning in {"": "", **describe_sections(config)}.items():
        if section:
            table.add_row()
            table.add_row("", (section, "bold underline"), "", meaning)
        for line in (line for line in lines if line.path.rpartition(".")[0] == section):
            nested = line.value if isinstance(line.value, dict) else {}  # such as model.build
            differs = not line.is_default and line.default is not REQUIRED
            text = f"{line.help} (default: {as_override(line.default)})" if differs else line.help
            add_row(line.path, "" if nested else as_override(line.value), text, line.is_default)
            for key, value in nested.items():
                add_row(f"{line.path}.{key}", as_override(value), "", line.is_default)
    console.table(table)
    console.line()
    console.line("* set by the recipe, + on the command line; the others are defaults", style="dim", wrap=True)


def _is_below(path: str, overridden: Sequence[str]) -> bool:
    """Whether an override set this path, something below it or above it."""
    return any(f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.") for other in overridden)
