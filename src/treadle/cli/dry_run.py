"""What `treadle train --dry-run` prints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.console import Console, Part, make_table
from treadle.orchestration.config import RunConfig

if TYPE_CHECKING:
    from treadle.orchestration.setup.dry_run import DryRun
    from treadle.orchestration.setup.memory import MemoryPart

_STRUCTURAL = "bold cyan"


def print_dry_run(config: RunConfig, runs: Path) -> int:
    """Try what the run needs, and print what was found; returns 0 if all is there, 1 if something is missing."""
    console = Console()
    with _offline():
        from treadle.orchestration.setup.dry_run import dry_run  # torch and transformers

        found = dry_run(config, runs, Console(stderr=True).line)
    _print_prompt(console, found)
    _print_memory(console, found.memory)
    for check in found.checks:
        style = "bold red" if check.is_missing else "green"
        console.line(f"{check.name:<13} ", (f"{'missing' if check.is_missing else 'ok':<8} ", style), check.text)
    return 0 if found.is_complete else 1


@contextmanager
def _offline() -> Iterator[None]:
    """Have the libraries of the hub, which read this when they are loaded, download nothing."""
    before = {variable: os.environ.get(variable) for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    os.environ.update(dict.fromkeys(before, "1"))
    try:
        yield
    finally:
        for variable, value in before.items():
            os.environ.pop(variable)
            if value is not None:
                os.environ[variable] = value


def _print_prompt(console: Console, found: DryRun) -> None:
    """Print the first prompt token for token; structural tokens, which only the template writes, in colour."""
    if found.prompt is None or found.chat is None:
        return
    structure = found.chat.renderer.structure
    parts: list[Part] = []
    for structural, ids in groupby(found.prompt.ids.tolist(), structure.is_structural):
        parts.append((structure.decode(ids), _STRUCTURAL if structural else ""))
    console.line(("first prompt", "bold"), f", task {found.prompt.task_id}, {len(found.prompt.ids)} tokens")
    console.text(*parts)
    console.line()


def _print_memory(console: Console, parts: list[MemoryPart]) -> None:
    if not parts:
        return
    table = make_table("memory", "MB", "how", text=("memory", "how"))
    for part in parts:
        table.add_row(part.name, f"{part.bytes / 1e6:,.1f}", part.formula)
    console.table(table)
    console.line(
        "P weights, R the reference's; T tokens of a micro-batch, L layers, h hidden, i intermediate size;", style="dim"
    )
    console.line("q, k widths of all query and all key heads, V vocabulary", style="dim")
    console.line()
