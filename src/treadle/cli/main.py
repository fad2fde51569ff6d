"""`treadle`: the command line. Importing it loads nothing else; commands and torch are loaded when needed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import treadle
from treadle.cli.commands import INTERRUPTED, Parser, add_commands, load_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    if arguments is None:
        sys.unraisablehook = _report_unraisable
    try:
        options = _parse(arguments)
        status = _run(options)
    except KeyboardInterrupt:
        # Before the command began, or again while reporting the first.
        status = INTERRUPTED
    if arguments is None and status == INTERRUPTED:
        leave(status)
    return status


def _run(options: argparse.Namespace) -> int:
    from treadle.cli.options import exit_status
    from treadle.loop.thread_count import wait_passively

    # The commands show their own progress.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    wait_passively()
    return exit_status(lambda options: load_command(options.run)(options), options, f"treadle {options.command}")


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    # Ctrl-C in a finalizer is raised again.
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def leave(status: int) -> None:
    """End this process immediately if PyTorch, with its slow exit handlers, is loaded; ignores further Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "torch" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the reader has left
                stream.flush()
        os._exit(status)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides may stand anywhere, even after an option, where argparse would refuse them."""
    parser: argparse.ArgumentParser = Parser(
        prog="treadle",
        description="Step-wise reinforcement learning of multi-turn LLM agents.",
        epilog="`treadle COMMAND --help` has examples. A first run, minutes on a CPU: treadle train demo",
    )
    parser.add_argument("--version", action="version", version=f"treadle {treadle.__version__}")
    add_commands(parser)
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
