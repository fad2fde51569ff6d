"""Declaring commands, and the arguments that several of them share."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sqlite3
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from treadle.cli.console import Console
from treadle.core.config import build
from treadle.core.errors import ConfigError, DataError, TreadleError
from treadle.core.files import is_refused, refusal
from treadle.core.registry import extra_of, how_to_install
from treadle.core.text import escape_text
from treadle.orchestration.store.address import run_path
from treadle.rollout.config import GatewayConfig

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction


def run_argument(text: str) -> Path:
    """Return the directory of the run that is addressed, with a checkpoint that is there if one is named."""
    try:
        return run_path(text)
    except TreadleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def record_argument(text: str) -> Path:
    """Return the directory of the run that is addressed, or of one made of a file of recorded trajectories."""
    path = Path(text)
    if path.suffix != ".jsonl" or not path.is_file():
        return run_argument(text)
    from treadle.orchestration.store.file_as_run import file_as_run  # pyarrow

    try:
        return file_as_run(path)
    except TreadleError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


INTERRUPTED = 130
"""Exit status after Ctrl-C."""

_SHARED: dict[str, dict[str, Any]] = {
    "recipe": {"metavar": "RECIPE", "help": "a shipped recipe (see `treadle recipes`) or a .yaml file"},
    "overrides": {
        "nargs": "*",
        "default": [],
        "metavar": "key.path=value",
        "help": "configuration values to change (`treadle recipes show demo` lists them)",
    },
    "run_directory": {"type": run_argument, "metavar": "RUN", "help": "a run directory, finished or not"},
    "record": {
        "type": record_argument,
        "metavar": "RUN",
        "help": "a run directory, finished or not; or a .jsonl file of `treadle serve --record`, `treadle eval --dump` "
        "or `treadle export-traces`",
    },
    "--runs": {"type": Path, "default": Path("runs"), "help": "where run directories go (default: runs)"},
    "--json": {"action": "store_true", "help": "print JSON instead of text"},
}


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str, *shared: str
) -> argparse.ArgumentParser:
    """Add a command that calls `run`, with its help, examples and shared arguments; returns its parser."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_shared(parser, *shared)
    return parser


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(name, **_SHARED[name])


def add_address(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=port, help=f"0: any free one (default: {port})")


def address_of(options: argparse.Namespace, command: str) -> GatewayConfig:
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port}: ports are 0 to 65535")
    fields = {name: vars(options).get(name) for name in ("host", "port", "advertised_url")}
    return build(GatewayConfig, fields, command)


def exit_status(run: Callable[[argparse.Namespace], int], options: argparse.Namespace, command: str) -> int:
    """Run a command ("treadle train", for errors); return 0 done, 1 failed, 2 wrong input or 130 interrupted."""
    if not os.isatty(0):  # piped input answers no question; a debugger may read a terminal
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        if nothing:
            os.close(nothing)
    try:
        status = run(options)
        sys.stdout.flush()
        return status
    except TreadleError as error:
        problem, status = str(error), 2 if isinstance(error, ConfigError | DataError) else 1
    except BrokenPipeError:  # `treadle report RUN | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except IsADirectoryError as error:
        path = error.filename2 or error.filename
        problem, status = f"{path} is a directory where a file belongs; move it away, or name another file", 1
    except OSError as error:
        path = re.sub(r"\.([^/]+?)(\.\d+)?\.tmp$", r"\1", str(error.filename2 or error.filename or ""))  # what is meant
        remedy = "choose another place, or check its permissions"
        problem, status = f"{path}: {refusal(error, remedy)}" if is_refused(error) and path else str(error), 1
    except MemoryError as error:  # also of pyarrow's, where `ulimit -v` refuses an allocation
        problem, status = f"out of memory: {error}" if str(error) else "out of memory", 1
    except sqlite3.Error as error:
        problem, status = f"the run's ledger.sqlite cannot be read: {error}", 1
    except ModuleNotFoundError as error:
        if error.name is None or extra_of(error.name) is None:
            raise
        problem, status = f"{command} needs {error.name}; install it with: {how_to_install(error.name)}", 1
    except KeyboardInterrupt:
        Console(stderr=True).line("interrupted")
        return INTERRUPTED
    Console(stderr=True).text(textwrap.indent(f"error: {problem}", "       ").lstrip())
    return status


def leave(status: int) -> None:
    """End this process now if PyTorch is loaded, whose exit handlers take seconds; another Ctrl-C changes nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "torch" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the reader has left
                stream.flush()
        os._exit(status)


class Parser(argparse.ArgumentParser):
    """Escapes what error messages repeat of the arguments, and suggests a choice that is spelled alike."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w.-]+", wrong[2]), n=1)
            message = f"{message}; did you mean {near[0]!r}?" if near else message
        super().error(escape_text(message))
