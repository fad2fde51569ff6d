"""`treadle new`."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
from importlib.resources import files
from pathlib import Path

from treadle.cli.console import Console
from treadle.cli.options import Commands, add_command
from treadle.core.errors import ConfigError, RunError

_EXAMPLES = """examples:
  treadle new env die                       a package die/: an environment, its tasks, a recipe and a test
  treadle train die/recipe.yaml             it learns as it stands; then make it yours
  python -m pytest die
"""
_SKELETON = "treadle.recipes.skeleton"


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "new", run_env, "make the skeleton of an environment", _EXAMPLES)
    below = parser.add_subparsers(metavar="{env}", required=True)
    env = add_command(below, "env", run_env, "make a package: environment, tasks, recipe and test", _EXAMPLES)
    env.add_argument("name", metavar="NAME", help="of the package, a new directory here")


def run_env(options: argparse.Namespace) -> int:
    """Write the package and list its files; returns 0."""
    console = Console()
    for path in make_environment(options.name, Path.cwd()):
        console.line(str(path))
    console.line(f"train: treadle train {options.name}/recipe.yaml")
    console.line(f"test:  python -m pytest {options.name}")
    return 0


def make_environment(name: str, parent: Path) -> list[Path]:
    """Write the package `name` into a directory, and return its files, relative to that.

    Raises ConfigError if `name` is not usable as a module name; RunError if something has that name already.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a Python package name; use letters, digits and _, as in my_environment")
    directory = parent / name
    if directory.exists():
        raise RunError(f"{str(directory)!r} exists already, and is left as it is; choose another name, or remove it")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name!r} would hide an installed module of that name; choose another name")
    directory.mkdir()
    written = []
    for source in sorted(files(_SKELETON).iterdir(), key=lambda file: file.name):
        if source.is_file():
            text = source.read_text(encoding="utf-8").replace(_SKELETON.replace(".", "/"), name)
            text = text.replace(_SKELETON, name).replace("recipe: skeleton", f"recipe: {name}")
            (directory / source.name).write_text(text, encoding="utf-8")
            written.append(Path(name) / source.name)
    return written
