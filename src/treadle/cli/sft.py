"""`treadle sft`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from treadle.cli.console import Console
from treadle.cli.live_progress import make_progress
from treadle.cli.options import Commands, add_command, add_recipe
from treadle.core.errors import ConfigError
from treadle.models.model_files import check_model_files
from treadle.orchestration.config import RunConfig, load_recipe
from treadle.training.demonstrations import load_demonstrations

_EXAMPLES = """examples:
  treadle sft demo --out models/warm
  treadle sft demo --out models/short warm_start.steps=200 seed=3

The result is a Hugging Face directory: for transformers, for `model.path`, for `treadle eval RECIPE --model DIR`.
"""


def add_parser(commands: Commands) -> None:
    summary = "supervised learning on demonstrations: a recipe's warm start alone"
    parser = add_command(commands, "sft", run, summary, _EXAMPLES)
    add_recipe(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="model directory to write; must be new")


def run(options: argparse.Namespace) -> int:
    """Train and write the model; returns 0."""
    config = load_recipe(options.recipe, options.overrides)
    _check(config, options.recipe, options.out)

    with make_progress(config) as progress:
        from treadle.orchestration.setup.warm_start import make_warm_model

        report = make_warm_model(config, options.out, progress)
    how = "read from the cache" if report.cached else f"{report.steps} steps in {report.seconds:.0f} s"
    console = Console()
    console.line(f"loss {report.loss:.3f} nats a token ({how})")
    console.line(f"model directory: {options.out}")
    evaluate = shlex.join(["eval", options.recipe, "--model", str(options.out)])
    console.line(f"evaluate it: treadle {evaluate}")
    train = shlex.join(["train", options.recipe, *next_overrides(config, options.out)])
    console.line(f"train from it: treadle {train}")
    return 0


def next_overrides(config: RunConfig, directory: Path) -> list[str]:
    """Return the overrides that make a run of this configuration start from the written model."""
    build = ["model.build=null"] if config.model.build is not None else []
    where = "path" if config.training.lora is None else "adapter"
    return [*build, f"model.{where}={directory}", "warm_start=null"]


def _check(config: RunConfig, recipe: str, out: Path) -> None:
    """Raise ConfigError for problems that would otherwise show only during or after the training."""
    if config.warm_start is None:
        raise ConfigError(f"recipe {recipe!r} has no warm_start section, so there is nothing to learn; add one")
    if out.exists():
        raise ConfigError(f"--out {str(out)!r} exists already; choose another directory")
    check_model_files(config.model)
    load_demonstrations(config.warm_start.demonstrations, config.warm_start.options, config.seed)(0)
