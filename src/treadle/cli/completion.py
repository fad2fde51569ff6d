"""`treadle completion SHELL`: a static script that completes commands, options, recipes and keys.

zsh uses bash's, through `bashcompinit`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from treadle.cli.commands import Commands
from treadle.cli.console import Console
from treadle.core.config import paths
from treadle.plan.config import RunConfig, recipe_names

_BASH = """_treadle() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words
  if ((COMP_CWORD > 2)); then case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{nested}
  esac; fi
  if [[ -z $words ]]; then if ((COMP_CWORD > 1)); then case "${{COMP_WORDS[1]}}" in
{plain}
  esac; else words="{commands}"; fi; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [[ ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o default -F _treadle treadle
"""


def run_completion(options: argparse.Namespace) -> int:
    found = list(_commands(options.commands))
    script = _fish(found) if options.shell == "fish" else _bash(found)
    prefix = "autoload -U +X bashcompinit && bashcompinit\n" if options.shell == "zsh" else ""
    Console().verbatim(prefix + script)
    return 0


class _Command(NamedTuple):
    """Possible words after a command: `_Command("recipes show", "show every ...", ["--yaml", "demo", ...])`."""

    name: str
    summary: str
    words: list[str]


def _commands(commands: Commands, above: str = "") -> Iterator[_Command]:
    """Yield each command, and the commands below it."""
    summaries = {action.dest: action.help or "" for action in commands._choices_actions}
    keys = [f"{key}=" for key in paths(RunConfig)]
    for name, parser in commands.choices.items():
        words: list[str] = []
        for action in parser._actions:
            words += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                words += action.choices
                yield from _commands(action, f"{above}{name} ")
            elif action.choices:
                words += map(str, action.choices)
            elif action.dest == "recipe":
                words += recipe_names()
            elif action.dest == "overrides":
                words += keys
        yield _Command(above + name, summaries.get(name, ""), words)


def _bash(commands: list[_Command]) -> str:
    def cases(nested: bool) -> str:
        return "\n".join(
            f'    "{each.name}") words="{" ".join(each.words)}";;' for each in commands if (" " in each.name) is nested
        )

    first = " ".join(each.name for each in commands if " " not in each.name)
    return _BASH.format(nested=cases(True), plain=cases(False), commands=first)


def _fish(commands: list[_Command]) -> str:
    lines = []
    for name, summary, words in commands:
        first, _, second = name.partition(" ")
        if not second:
            lines.append(f"complete -c treadle -n __fish_use_subcommand -f -a {first} -d {_quoted(summary)}")
        seen = f"__fish_seen_subcommand_from {first}" + f"; and __fish_seen_subcommand_from {second}" * bool(second)
        for option in (word for word in words if word.startswith("--")):
            lines.append(f"complete -c treadle -n {_quoted(seen)} -l {option[2:]}")
        if plain := [word for word in words if not word.startswith("-")]:
            lines.append(f"complete -c treadle -n {_quoted(seen)} -a {_quoted(' '.join(plain))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
