"""`treadle export`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from treadle.cli.console import Console
from treadle.cli.options import Commands, add_command, add_run
from treadle.core.errors import ConfigError
from treadle.models.model_files import is_adapter
from treadle.orchestration.store.checkpoint_retention import find_checkpoint

_EXAMPLES = """examples:
  treadle export runs/demo models/demo                        its latest checkpoint
  treadle export runs/demo models/best --checkpoint best      the one with the best held-out evaluation
  treadle export runs/demo models/early --checkpoint step-000030
  treadle export runs/lora models/whole --merge               base and adapter in one

The result is a Hugging Face directory without the optimizer: for transformers, for `model.path`, for other engines.
Of a run with training.lora it is the adapter, for peft and for `model.adapter`, or with --merge a whole model.
The run may still be in progress.
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "export", run, "write a run's model as a plain Hugging Face directory", _EXAMPLES)
    add_run(parser)
    parser.add_argument("out", type=Path, metavar="DIR", help="model directory to write; must be new")
    parser.add_argument(
        "--checkpoint", default="latest", metavar="NAME", help="such as step-000030, best or latest (default: latest)"
    )
    parser.add_argument("--merge", action="store_true", help="add an adapter to its base, and write a whole model")


def run(options: argparse.Namespace) -> int:
    """Write the model; returns 0."""
    if options.out.exists():
        raise ConfigError(f"{str(options.out)!r} exists already; choose another directory")
    find_checkpoint(options.run_directory, options.checkpoint)  # or an error, before torch is loaded

    from treadle.orchestration.export import export_checkpoint

    checkpoint = export_checkpoint(options.run_directory, options.out, options.checkpoint, options.merge)
    console = Console()
    console.line(f"model of {checkpoint}: {options.out}")
    where = "model.adapter" if is_adapter(options.out) else "model.path"
    console.line(f"train from it: treadle train RECIPE {shlex.quote(f'{where}={options.out}')} model.build=null")
    return 0
