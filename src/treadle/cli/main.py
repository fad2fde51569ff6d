"""`treadle`: the command line. Heavy imports happen only once a command's inputs have been checked."""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

import treadle
from treadle.cli import bench, data, evaluate, export, models, new, plot, recipes, report, serve, sft, show, train
from treadle.cli.console import Console
from treadle.core.errors import ConfigError, DataError, TreadleError
from treadle.core.extras import extra_of, how_to_install
from treadle.core.text import escape_text
from treadle.orchestration.setup.thread_count import wait_passively

_COMMANDS = (train, sft, evaluate, export, serve, new, recipes, models, data, report, show, plot, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    options = _parse(arguments)
    _close_standard_input()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the commands show their own progress
    wait_passively()
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except TreadleError as error:
        _complain(textwrap.indent(f"error: {error}", "       ").lstrip())
        return 2 if isinstance(error, ConfigError | DataError) else 1
    except BrokenPipeError:  # `treadle report RUN | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _complain(f"error: {error}")
        return 1
    except sqlite3.Error as error:
        _complain(f"error: the run's ledger.sqlite cannot be read: {error}")
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or extra_of(error.name) is None:
            raise
        how = how_to_install(error.name)
        _complain(f"error: treadle {options.command} needs {error.name}; install it with: {how}")
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130
    return status


def _close_standard_input() -> None:
    """Replace piped standard input by nothing, so that it answers no question; a debugger may read a terminal."""
    if not os.isatty(0):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        if nothing:
            os.close(nothing)


def _complain(message: str) -> None:
    Console(stderr=True).text(message)


class _Parser(argparse.ArgumentParser):
    """Parses arguments, and escapes what error messages repeat of them."""

    def error(self, message: str) -> NoReturn:
        super().error(escape_text(message))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides may stand anywhere, even after an option, where argparse would refuse them."""
    parser = _Parser(
        prog="treadle",
        description="Step-wise reinforcement learning of multi-turn LLM agents.",
        epilog="`treadle COMMAND --help` has examples. A first run, minutes on a CPU: treadle train demo",
    )
    parser.add_argument("--version", action="version", version=f"treadle {treadle.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parser(commands)
    options, rest = parser.parse_known_args(arguments)
    unknown = [argument for argument in rest if argument.startswith("-") or "overrides" not in options]
    if unknown:
        settings = "settings are written key.path=value; " if "overrides" in options else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)} ({settings}see treadle {options.command} --help)")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


if __name__ == "__main__":
    sys.exit(main())
