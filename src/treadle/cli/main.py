"""`treadle`: the command line. Heavy imports happen only once a command's inputs have been checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import treadle
from treadle.cli import bench, evaluate, recipes, report, sft, show, train
from treadle.core.errors import ConfigError, DataError, TreadleError

_COMMANDS = (train, sft, evaluate, recipes, report, show, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="treadle", description="Step-wise reinforcement learning of multi-turn LLM agents."
    )
    parser.add_argument("--version", action="version", version=f"treadle {treadle.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except TreadleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | DataError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
