"""`treadle train`."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from treadle.cli.console import Console
from treadle.cli.dry_run import print_dry_run
from treadle.cli.live_progress import make_progress
from treadle.cli.options import Commands, add_command, add_recipe, add_runs
from treadle.core.errors import ConfigError, RunError
from treadle.data.config import sources_of
from treadle.orchestration.config import RunConfig, load_recipe
from treadle.orchestration.setup.inputs import IN_MEMORY, load_inputs
from treadle.orchestration.setup.validation import changes, check_changes, check_config
from treadle.orchestration.store.checkpoint_retention import find_checkpoint
from treadle.orchestration.store.run_directory import RunDirectory, find_run, make_directory

_EXAMPLES = """examples:
  treadle train demo
  treadle train demo seed=3 orchestration.updates=100 --name short
  treadle train my_recipe.yaml --dry-run      check everything and show the first prompt, but train nothing
  treadle train demo --resume                 the newest unfinished run of that recipe
  treadle train runs/short --resume orchestration.updates=200             a certain run, with more updates
  treadle train demo --resume-from step-000030 --name short               back to a checkpoint that was kept

Ctrl-C finishes the update and saves a checkpoint; a second one stops at once. Continue with --resume.
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "train", run, "train a recipe, or resume a run", _EXAMPLES)
    add_recipe(parser)
    parser.add_argument("--name", help="of the run directory (default: recipe, seed and time)")
    add_runs(parser)
    parser.add_argument("--resume", action="store_true", help="go on from a run's latest checkpoint")
    parser.add_argument(
        "--resume-from", metavar="NAME", help="go back to an earlier checkpoint (or best); all after it is rolled back"
    )
    what = "only check data, model, template, servers and memory, and show the first prompt"
    parser.add_argument("--dry-run", action="store_true", help=what)


def run(options: argparse.Namespace) -> int:
    """Train; returns 0 if the run is finished, 130 if it was asked to stop. With --dry-run: 0 if nothing is missing."""
    resume = options.resume or options.resume_from is not None
    if options.dry_run:
        if resume:
            raise ConfigError("--dry-run is for a new run; leave out --resume, or --dry-run")
        return print_dry_run(load_recipe(options.recipe, options.overrides), options.runs)
    if resume:
        config, path = _to_resume(options)
    else:
        config = load_recipe(options.recipe, options.overrides)
        path = options.runs / (options.name or "")
        if options.name and path.exists() and (not path.is_dir() or any(path.iterdir())):  # before torch is loaded
            problem = f"run directory {str(path)!r} is already in use"
            raise RunError(f"{problem}; continue it with --resume or choose another --name")
    check_config(config)
    inputs = load_inputs(config)
    with nullcontext(path) if resume else _new_directory(options, config) as path:
        runs = [] if options.runs == Path("runs") else ["--runs", str(options.runs)]
        command = "treadle " + shlex.join(["train", options.recipe, "--resume", "--name", path.name, *runs])
        try:
            with make_progress(config) as progress:
                from treadle.orchestration.train import train_run

                summary = train_run(config, inputs, path, progress, resume=resume, checkpoint=options.resume_from)
        except KeyboardInterrupt:
            saved = any(path.glob("checkpoints/step-*"))
            advice = f"go on from the latest checkpoint with: {command}" if saved else "nothing was trained yet"
            Console(stderr=True).line(f"interrupted; {advice}")
            return 130
        if summary["stopped_early"]:
            Console(stderr=True).line(f"stopped after {summary['updates']} updates; go on with: {command}")
            return 130
        from treadle.cli.summary import print_result

        print_result(summary, path, config)
        return 0


def _to_resume(options: argparse.Namespace) -> tuple[RunConfig, Path]:
    path = Path(options.recipe)
    if (path / "config.yaml").is_file():  # a run's directory in place of its recipe
        options.runs, options.name, options.recipe = path.parent, path.name, RunDirectory.open(path).config().recipe
    recipe = None if options.name else load_recipe(options.recipe).recipe
    path = options.runs / options.name if recipe is None else find_run(options.runs, recipe)
    run = RunDirectory.open(path)
    if run.has_summary and not options.overrides and options.resume_from is None:
        raise RunError(
            f"run {str(path)!r} is finished; nothing to resume (see treadle report {path}); "
            "give it more orchestration.updates, or --resume-from an earlier checkpoint"
        )
    config = run.config(options.overrides)
    check_changes(changes(run.config(), config))
    find_checkpoint(path, options.resume_from or "latest")  # or an error, before torch is loaded
    if sources_of(config.data.train)[0].source == IN_MEMORY:
        raise RunError(f"run {str(path)!r} was started from Python; go on with treadle.train(..., resume=True) there")
    return config, path


@contextmanager
def _new_directory(options: argparse.Namespace, config: RunConfig) -> Iterator[Path]:
    """Yield a path for the run: as named, or a new directory of the default name.

    It is removed if the run ends before it recorded anything that could be resumed.
    """
    path: Path = options.runs / options.name if options.name else make_directory(options.runs, config)
    new = not path.exists() or not any(path.iterdir())
    try:
        yield path
    finally:
        if new and _is_stub(RunDirectory(path)):
            shutil.rmtree(path)
        elif not options.name:
            with suppress(OSError):  # unless something is in it
                path.rmdir()


def _is_stub(run: RunDirectory) -> bool:
    """Whether nothing is recorded in it, and no other process that took the same name is training there."""
    if not run.config_file.is_file() or any(run.rollouts.glob("*.parquet")) or any(run.checkpoints.glob("step-*")):
        return False
    try:
        run.lock()
    except RunError:
        return False
    run.close()
    return True
