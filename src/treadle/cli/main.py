"""`treadle`: the command line. Heavy imports happen only once a command's inputs have been checked."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import treadle
from treadle.cli import completion, documentation, models, recipes, report, serve, show, train
from treadle.cli.options import INTERRUPTED, Parser, exit_status, leave
from treadle.orchestration.setup.thread_count import wait_passively


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    if arguments is None:
        sys.unraisablehook = _report_unraisable
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the commands show their own progress
    wait_passively()
    try:
        options = _parse(arguments)
        status = exit_status(options.run, options, f"treadle {options.command}")
    except KeyboardInterrupt:  # before it began, or another one while the first was reported
        status = INTERRUPTED
    if arguments is None and status == INTERRUPTED:
        leave(status)
    return status


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):  # Ctrl-C came in a finalizer, and comes again
        sys.__unraisablehook__(unraisable)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides may stand anywhere, even after an option, where argparse would refuse them."""
    parser = Parser(
        prog="treadle",
        description="Step-wise reinforcement learning of multi-turn LLM agents.",
        epilog="`treadle COMMAND --help` has examples. A first run, minutes on a CPU: treadle train demo",
    )
    parser.add_argument("--version", action="version", version=f"treadle {treadle.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (train, models, report, show, serve, recipes, completion, documentation):
        module.add_commands(commands)
    words = sys.argv[1:] if arguments is None else arguments
    options, rest = parser.parse_known_args(words or ["--help"])
    unknown = [argument for argument in rest if argument.startswith("-") or "overrides" not in options]
    if unknown:
        settings = "settings are written key.path=value; " if "overrides" in options else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)} ({settings}see treadle {options.command} --help)")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


if __name__ == "__main__":
    sys.exit(main())
