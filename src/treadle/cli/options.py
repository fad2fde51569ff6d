"""Running a command: exit status, reporting of errors, and shared arguments."""

from __future__ import annotations

import argparse
import os
import re
import sqlite3
import sys
import textwrap
from collections.abc import Callable

from treadle.cli.commands import INTERRUPTED
from treadle.cli.console import Console
from treadle.core.config import build
from treadle.core.errors import ConfigError, DataError, TreadleError
from treadle.core.files import is_refused, refusal
from treadle.core.registry import extra_of, how_to_install
from treadle.rollout.config import GatewayConfig


def address_of(options: argparse.Namespace, command: str) -> GatewayConfig:
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port}: ports are 0 to 65535")
    fields = {name: vars(options).get(name) for name in ("host", "port", "advertised_url")}
    return build(GatewayConfig, fields, command)


def exit_status(run: Callable[[argparse.Namespace], int], options: argparse.Namespace, command: str) -> int:
    """Run a command ("treadle train", for errors); return 0 done, 1 failed, 2 wrong input or 130 interrupted."""
    # Piped input cannot answer questions; a debugger may read a terminal.
    if not os.isatty(0):
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
    except BrokenPipeError:
        # `treadle report RUN | head`: the reader has exited.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except IsADirectoryError as error:
        path = error.filename2 or error.filename
        problem, status = f"{path} is a directory where a file belongs; move it away, or name another file", 1
    except OSError as error:
        # the intended path
        path = re.sub(r"\.([^/]+?)(\.\d+)?\.tmp$", r"\1", str(error.filename2 or error.filename or ""))
        remedy = "choose another place, or check its permissions"
        problem, status = f"{path}: {refusal(error, remedy)}" if is_refused(error) and path else str(error), 1
    except MemoryError as error:
        # Includes pyarrow's, if `ulimit -v` refuses an allocation.
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
