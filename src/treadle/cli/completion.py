"""`treadle completion SHELL`: a static script that completes commands, options, recipes and keys."""

from __future__ import annotations

import argparse

import shtab

from treadle.cli.commands import Commands
from treadle.cli.console import Console
from treadle.core.config import paths
from treadle.plan.config import RunConfig, recipe_names

# No space after a key, whose value follows.
_BASH = """
_treadle() { _shtab_treadle "$@"; if [[ ${COMPREPLY[0]} == *= ]]; then compopt -o nospace 2>/dev/null; fi }
complete -o bashdefault -F _treadle treadle
"""


def run_completion(options: argparse.Namespace) -> int:
    _name_choices(options.commands, {"recipe": [*recipe_names()], "overrides": [f"{key}=" for key in paths(RunConfig)]})
    script = shtab.complete(options.parser, options.shell)
    Console().verbatim(script + _BASH * (options.shell == "bash"))
    return 0


def _name_choices(commands: Commands, choices: dict[str, list[str]]) -> None:
    """Add the words that arguments may be to all commands: their parsers take others, too."""
    for parser in commands.choices.values():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                _name_choices(action, choices)
            elif action.dest in choices:
                action.choices = choices[action.dest]
