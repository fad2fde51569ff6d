"""What the console scripts have in common: how they end, and how they say what went wrong."""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import textwrap
from collections.abc import Callable
from typing import NoReturn

from treadle.cli.console import Console
from treadle.core.errors import ConfigError, DataError, TreadleError
from treadle.core.extras import extra_of, how_to_install
from treadle.core.text import escape_text


def exit_status(run: Callable[[argparse.Namespace], int], options: argparse.Namespace, command: str) -> int:
    """Run a command and return its exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    command: as the user called it, for errors: "treadle train".
    """
    _close_standard_input()
    try:
        status = run(options)
        sys.stdout.flush()
    except TreadleError as error:
        _complain(textwrap.indent(f"error: {error}", "       ").lstrip())
        return 2 if isinstance(error, ConfigError | DataError) else 1
    except BrokenPipeError:  # `treadle report RUN | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except IsADirectoryError as error:
        where = error.filename2 or error.filename
        _complain(f"error: {where} is a directory where a file belongs; move it away, or name another file")
        return 1
    except OSError as error:
        _complain(f"error: {error}")
        return 1
    except MemoryError as error:  # also of pyarrow's, where `ulimit -v` refuses an allocation
        _complain(f"error: out of memory: {error}" if str(error) else "error: out of memory")
        return 1
    except sqlite3.Error as error:
        _complain(f"error: the run's ledger.sqlite cannot be read: {error}")
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or extra_of(error.name) is None:
            raise
        how = how_to_install(error.name)
        _complain(f"error: {command} needs {error.name}; install it with: {how}")
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


class Parser(argparse.ArgumentParser):
    """Parses arguments, and escapes what error messages repeat of them."""

    def error(self, message: str) -> NoReturn:
        super().error(escape_text(message))
