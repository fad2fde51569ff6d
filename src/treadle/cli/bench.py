"""`treadle bench`."""

from __future__ import annotations

import argparse
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

from treadle.benchmarks.report import Report, Reports, machine
from treadle.cli.console import Console, make_table
from treadle.cli.options import Commands, add_command, positive, require_record
from treadle.core.errors import ConfigError

_EXAMPLES = """benchmarks:
  rollout   multi-turn sampling: TorchEngine, with and without prefix reuse, against transformers' generate
  update    one optimizer update of the demo's shape, or recorded ones of a run, under every packing
  packing   forward and backward passes of step, chain and tree packing on six workloads; their parts alone
  merge     building prefix trees alone, against plain Python
  gateway   the gateway before a fake engine, against calling the session directly
  render    the next prompt of conversations of 10 to 80 messages, against tokenizing them anew
  async     what orchestration.max_staleness gains: the loop, with engine and learner simulated, in virtual time
  kv        growing episodes in an engine's KV cache, admitted by count or by engine.kv_budget, in virtual time
  scaling   one update by 1, 2 and 4 ranks of this machine: time, balance, memory
  threads   what more torch threads gain, and what they cost beside another busy process
  import    how long `import treadle` takes

examples:
  treadle bench rollout
  treadle bench update --threads 2 --repeats 5 --json
  treadle bench update --replay runs/demo
  treadle bench packing --repeats 1
  treadle bench gateway
  treadle bench packing --device cuda --output packing.json
  treadle bench async --generation lognormal:300:0.8 --training 120 --engine-capacity 256
"""
_MODULES = {
    "rollout": "rollout",
    "update": "update",
    "packing": "packing",
    "merge": "merge",
    "gateway": "gateway",
    "render": "render",
    "async": "asynchronous",
    "kv": "kv_admission",
    "scaling": "scaling",
    "threads": "threads",
    "import": "imports",
}
_SIZES = {
    "steps": (int, 1, "steps of a trajectory (default: 8)"),
    "training": (float, 0, "seconds of an update (default: 45)"),
    "publication": (float, 0, "seconds until the engine has new weights (default: 2)"),
    "engine_capacity": (int, 1, "steps that the engine samples at a time, each of another trajectory (default: 64)"),
    "tasks_per_update": (int, 1, "groups of an update (default: 8)"),
    "group_size": (int, 2, "trajectories of a group (default: 8)"),
    "updates": (int, 5, "updates (default: 60)"),
    "seed": (int, 0, "of all draws (default: 0)"),
}
"""Name -> type, least value, help."""


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "bench", run, "measure something on this machine", _EXAMPLES)
    parser.add_argument("name", metavar="NAME", choices=sorted(_MODULES), help=", ".join(_MODULES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--threads", type=positive, default=1, help="torch threads (default: 1)")
    parser.add_argument("--repeats", type=positive, default=3, help="measured rounds; medians are shown (default: 3)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of packing; the others use the CPU")
    parser.add_argument("--replay", type=Path, metavar="RUN", help="of update: replay recorded batches of this run")
    simulated = parser.add_argument_group("of async")
    simulated.add_argument(
        "--generation", metavar="lognormal:MEAN:SIGMA", help="seconds of a trajectory (default: lognormal:60:1)"
    )
    simulated.add_argument("--run", type=Path, dest="like", metavar="RUN", help="... as in this run instead")
    simulated.add_argument("--plot", type=Path, metavar="FILE", help="draw it too, to a .png")
    for name, (kind, _, text) in _SIZES.items():
        simulated.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON object there too")


def run(options: argparse.Namespace) -> int:
    """Run the benchmark and print its result, and write it to `--output`; returns 0."""
    if options.device != "cpu" and options.name != "packing":
        raise ConfigError(f"--device {options.device}: 'treadle bench {options.name}' runs on the CPU alone")
    if options.replay is not None and options.name != "update":
        raise ConfigError(f"--replay {options.replay}: only 'treadle bench update' replays a run")
    simulated = _simulated(options)
    if simulated and options.name != "async":
        raise ConfigError(f"{_flag(next(iter(simulated)))}: only 'treadle bench async' simulates")
    for recorded in (options.replay, options.like):
        if recorded is not None:
            require_record(recorded)
    for name, file in (("output", options.output), ("plot", options.plot)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"--{name} {file}: there is no directory {str(file.parent)!r}")
    module = import_module(f"treadle.benchmarks.{_MODULES[options.name]}")
    own = {"packing": {"device": options.device}, "update": {"run": options.replay}, "async": simulated}
    report = module.measure(options.threads, options.repeats, **own.get(options.name, {}))
    show(report, options.json)
    if options.output is not None:
        options.output.write_text(json.dumps(report.data()) + "\n", encoding="utf-8")
    return 0


def show(report: Report | Reports, as_json: bool) -> None:
    """Print a benchmark's result, as tables or as one JSON object."""
    console = Console()
    if as_json:
        console.json(report.data(), indent=None)
        return
    for number, part in enumerate(report.tables):
        if number:
            console.line()
        first = part.rows[0]
        text = tuple(column for column in first if isinstance(first[column], str))
        table = make_table(*first, title=f"treadle bench {part.name}", text=text)
        for row in part.rows:
            table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.table(table)
        console.line(f"{part.note}; {machine()}", wrap=True)


def _simulated(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `async`, by the names of its parameters. Raises ConfigError for sizes that mean nothing."""
    given = {"generation": options.generation, "run": options.like, "plot": options.plot}
    if options.generation is not None and options.like is not None:
        both = f"--generation {options.generation} and --run {options.like}"
        raise ConfigError(f"{both} both say how long trajectories take; give one")
    for name, (_, least, _) in _SIZES.items():
        value = given[name] = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{_flag(name)} {value}: must be {least} or more")
    return {name: value for name, value in given.items() if value is not None}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
