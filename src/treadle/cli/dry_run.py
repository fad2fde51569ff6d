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
    from treadle.orchestration.setup.dry_run import DryRun, MemoryPart


def print_dry_run(config: RunConfig, runs: Path) -> int:
    """Check and print what the run needs; returns 0 if everything is there, 1 if something is missing."""
    console = Console()
    with _offline():
        from treadle.orchestration.setup.dry_run import dry_run  # torch and transformers

        result = dry_run(config, runs, Console(stderr=True).line)
    _print_prompt(console, result)
    _print_memory(console, result.memory)
    for check in result.checks:
        style = "bold red" if check.is_missing else "green"
        console.line(f"{check.name:<13} ", (f"{'missing' if check.is_missing else 'ok':<8} ", style), check.text)
    return 0 if result.is_complete else 1


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the hub's libraries, which read these variables when they are imported, from downloading."""
    before = {variable: os.environ.get(variable) for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    os.environ.update(dict.fromkeys(before, "1"))
    try:
        yield
    finally:
        for variable, value in before.items():
            os.environ.pop(variable)
            os.environ.update({} if value is None else {variable: value})


def _print_prompt(console: Console, result: DryRun) -> None:
    """Print the first prompt; structural tokens, which only the template writes, in color."""
    if result.prompt is None or result.chat is None:
        return
    structure = result.chat.renderer.structure
    parts: list[Part] = [
        (structure.decode(ids), "bold cyan" if structural else "")
        for structural, ids in groupby(result.prompt.ids.tolist(), structure.is_structural)
    ]
    console.line(("first prompt", "bold"), f", task {result.prompt.task_id}, {len(result.prompt.ids)} tokens")
    console.text(*parts)
    console.line()


def _print_memory(console: Console, parts: list[MemoryPart]) -> None:
    if not parts:
        return
    table = make_table("memory", "MB", "how", text=("memory", "how"))
    for part in parts:
        table.add_row(part.name, f"{part.bytes / 1e6:,.1f}", part.formula)
    console.table(table)
    console.text(
        "P weights, R the reference's; T tokens of a micro-batch, L layers, h hidden, i intermediate size;\n"
        "q, k widths of all query and all key heads, V vocabulary",
        style="dim",
    )
    console.line()
