"""`treadle train`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from treadle.cli.options import Commands, add_command
from treadle.core.errors import ConfigError
from treadle.orchestration.config import load_recipe
from treadle.orchestration.inputs import load_inputs

_EXAMPLES = """examples:
  treadle train demo
  treadle train demo seed=3 orchestration.updates=100 --name short
  treadle train my_recipe.yaml model.path=/models/my-model
  treadle train demo --resume                 the newest run of that recipe
  treadle train demo --resume --name short    a certain run
"""


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "train", run, "train a recipe, or resume a run", _EXAMPLES)
    parser.add_argument("recipe", metavar="RECIPE", help="a shipped recipe (see `treadle recipes`) or a .yaml file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="configuration values to change")
    parser.add_argument("--name", help="of the run directory (default: recipe, seed and time)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where run directories go (default: runs)")
    parser.add_argument("--resume", action="store_true", help="go on from a run's latest checkpoint")


def run(options: argparse.Namespace) -> int:
    """Train; 0 if the run is finished, 130 if it was asked to stop (and can be resumed)."""
    from treadle.orchestration.run_directory import RunDirectory, default_name, find_run

    config = load_recipe(options.recipe, options.overrides)
    if options.resume:
        if options.overrides:
            raise ConfigError(
                f"--resume goes on with the run's own configuration; leave out {' '.join(options.overrides)}"
            )
        path = options.runs / options.name if options.name else find_run(options.runs, config.recipe)
        config = RunDirectory.open(path).config()
    else:
        path = options.runs / (options.name or default_name(config))
    inputs = load_inputs(config)

    from treadle.cli.finish import print_result
    from treadle.cli.live import make_progress
    from treadle.orchestration.train import resume_run, start_run

    with make_progress(config.orchestration.updates) as progress:
        summary = (resume_run if options.resume else start_run)(config, inputs, path, progress)
    if summary["stopped_early"]:
        again = f"treadle train {options.recipe} --resume --name {path.name}"
        print(f"stopped after {summary['updates']} updates; go on with: {again}", file=sys.stderr)
        return 130
    print_result(summary, path, config)
    return 0
