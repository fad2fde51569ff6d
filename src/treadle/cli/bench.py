"""`treadle bench`."""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path

from treadle.cli.options import Commands, add_command
from treadle.core.errors import ConfigError

_EXAMPLES = """benchmarks:
  rollout   multi-turn sampling: TorchEngine, with and without prefix reuse, against transformers' generate
  update    one optimizer update of the demo's shape, or recorded ones of a run, under every packing
  packing   forward and backward passes of step, chain and tree packing on six workloads; their parts alone
  merge     building prefix trees alone, against plain Python
  gateway   the gateway before a fake engine, against calling the session directly
  render    the next prompt of conversations of 10 to 80 messages, against tokenizing them anew
  import    how long `import treadle` takes

examples:
  treadle bench rollout
  treadle bench update --threads 2 --repeats 5 --json
  treadle bench update --replay runs/demo
  treadle bench packing --repeats 1
  treadle bench gateway
  treadle bench packing --device cuda --output packing.json
"""
_MODULES = {
    "rollout": "rollout",
    "update": "update",
    "packing": "packing",
    "merge": "merge",
    "gateway": "gateway",
    "render": "render",
    "import": "imports",
}


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "bench", run, "measure something on this machine", _EXAMPLES)
    parser.add_argument("name", metavar="NAME", choices=sorted(_MODULES), help=", ".join(_MODULES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds; medians are reported (default: 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of packing; the others use the CPU")
    parser.add_argument("--replay", type=Path, metavar="RUN", help="of update: replay recorded batches of this run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON object there too")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    if options.device != "cpu" and options.name != "packing":
        raise ConfigError(f"--device {options.device}: 'treadle bench {options.name}' runs on the CPU alone")
    if options.replay is not None and options.name != "update":
        raise ConfigError(f"--replay {options.replay}: only 'treadle bench update' replays a run")
    if options.output is not None and not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: there is no directory {str(options.output.parent)!r}")
    module = import_module(f"treadle.cli.benchmarks.{_MODULES[options.name]}")
    own = {"packing": {"device": options.device}, "update": {"run": options.replay}}.get(options.name, {})
    report = module.measure(max(1, options.threads), max(1, options.repeats), **own)
    report.print(options.json)
    if options.output is not None:
        options.output.write_text(json.dumps(report.data()) + "\n", encoding="utf-8")
    return 0
