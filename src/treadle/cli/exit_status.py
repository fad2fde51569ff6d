"""How the console scripts end, and how they report what went wrong."""

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
from treadle.core.registry import extra_of, how_to_install
from treadle.core.text import escape_text


def exit_status(run: Callable[[argparse.Namespace], int], options: argparse.Namespace, command: str) -> int:
    """Run a command and return its exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted.

    command: as the user called it, for errors: "treadle train".
    """
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
        problem, status = str(error), 1
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
        return 130
    Console(stderr=True).text(textwrap.indent(f"error: {problem}", "       ").lstrip())
    return status


class Parser(argparse.ArgumentParser):
    """Escapes what error messages repeat of the arguments."""

    def error(self, message: str) -> NoReturn:
        super().error(escape_text(message))
