"""`treadle bench`."""

from __future__ import annotations

import argparse
from importlib import import_module

from treadle.cli.options import Commands, add_command

_EXAMPLES = """benchmarks:
  rollout   multi-turn sampling: TorchEngine against transformers' generate
  update    one optimizer update: step against chain packing
  import    how long `import treadle` takes

examples:
  treadle bench rollout
  treadle bench update --threads 2 --repeats 5 --json
"""
_MODULES = {"rollout": "rollout", "update": "update", "import": "imports"}


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "bench", run, "measure something on this machine", _EXAMPLES)
    parser.add_argument("name", metavar="NAME", choices=sorted(_MODULES), help=", ".join(_MODULES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds; medians are reported (default: 3)")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    module = import_module(f"treadle.cli.benchmarks.{_MODULES[options.name]}")
    module.measure(max(1, options.threads), max(1, options.repeats)).print(options.json)
    return 0
