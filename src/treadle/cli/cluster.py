"""`treadle cluster check`."""

from __future__ import annotations

import argparse

from treadle.cli.console import Console, make_table
from treadle.cli.options import Commands, add_command, add_recipe, add_runs
from treadle.core.errors import ConfigError
from treadle.orchestration.config import load_recipe

_EXAMPLES = """examples:
  treadle cluster check demo placement.kind=ray placement.learner.ranks=2
  treadle cluster check my_recipe.yaml placement.address=10.0.0.1:6379 --runs /shared/runs

It reserves what a run of the recipe would, compares versions, directory and GPUs at each place, and starts nothing.
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "cluster", run, "what a cluster has for a recipe", _EXAMPLES)
    parser.add_argument("action", choices=["check"], help="check: print what would be placed where, or what is missing")
    add_recipe(parser)
    add_runs(parser)


def run(options: argparse.Namespace) -> int:
    """Print the place of each process; returns 0. Raises PlacementError for what is missing."""
    config = load_recipe(options.recipe, options.overrides)
    if config.placement.kind != "ray":
        raise ConfigError(f"placement.kind is {config.placement.kind!r}: no cluster is used; set placement.kind=ray")
    from treadle.placement.runtime import placed  # ray

    console = Console()
    with placed(config, options.runs.absolute(), Console(stderr=True).line) as placement:
        table = make_table("process", "node", "resources", text=("process", "node", "resources"))
        for bundle, place in zip(placement.reservation.bundles, placement.places, strict=True):
            resources = ", ".join(f"{amount:g} {name}" for name, amount in bundle.resources.items())
            table.add_row(str(bundle), place.node, resources)
        console.table(table)
        versions = ", ".join(f"{name} {version}" for name, version in placement.places[0].versions.items())
        console.line(f"{placement}, all with {versions}; {options.runs} is one directory for all")
    return 0
