"""Declaring commands, and the arguments that several of them share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command that calls `run`, with its help and examples; returns its sub-parser, to be given arguments."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `RECIPE [key.path=value ...]`."""
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe (see `treadle recipes`) or a .yaml file")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser, what: str = "configuration values to change") -> None:
    """Add the arguments `[key.path=value ...]`. what: their help."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=what)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def positive(text: str) -> int:
    """Return a whole number above 0; as argparse's `type`, which names the argument in the error."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def require_record(run: Path) -> None:
    """Raise RunError, with the reason, if the run has no ledger to read."""
    from treadle.orchestration.store.run_directory import RunDirectory

    RunDirectory.open(run).ledger()
