"""`treadle top`."""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.console import Console, Table, make_table
from treadle.cli.options import Commands, add_command, add_run

if TYPE_CHECKING:
    from treadle.core.engine import ProcessId
    from treadle.orchestration.reporting.live_status import RunStatus
    from treadle.orchestration.store.run_directory import RunDirectory

_EXAMPLES = """examples:
  treadle top runs/demo             a live table, until the run ends or Ctrl-C
  treadle top runs/demo --once      the table once

  running, waiting   calls, attempts or groups in progress, and those queued
  sessions           attempts that an engine keeps its cache for
  cache              share of its KV cache that holds tokens
  version            of the policy that it serves
  CPU, memory        of its process, if that is on this machine: 100% is one core
"""
_PERIOD = 1.0  # seconds between two looks
_SAMPLE = 0.3  # seconds over which the first look measures CPU time
_COLUMNS = ("component", "", "running", "waiting", "sessions", "cache", "version", "CPU", "memory")


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "top", run, "show what a run does now: learner, engines, rollouts", _EXAMPLES)
    add_run(parser)
    parser.add_argument("--once", action="store_true", help="print the table once, as without a terminal")


def run(options: argparse.Namespace) -> int:
    """Show the table until the run ends or Ctrl-C; returns 0. Raises RunError if the directory is not a run."""
    from treadle.orchestration.store.run_directory import RunDirectory

    directory, console, usage = RunDirectory.open(options.run_directory), Console(), _Usage()
    try:
        _view(directory, usage)
        time.sleep(_SAMPLE)
        if not options.once and console.is_terminal:
            with console.live() as show:
                while directory.state() == "in progress":
                    show(_view(directory, usage))
                    time.sleep(_PERIOD)
        for part in _view(directory, usage):
            console.line(part) if isinstance(part, str) else console.table(part)
    except KeyboardInterrupt:
        pass
    return 0


def _view(directory: RunDirectory, usage: _Usage) -> list[str | Table]:
    """Return lines, and a table while the run is in progress."""
    from treadle.orchestration.reporting.live_status import RunStatus

    state, status = directory.state(), RunStatus.read(directory.status_file)
    if status is None:
        return [f"{directory.path}: {state}; it has no status.json{' yet' if state == 'in progress' else ''}"]
    lines: list[str | Table] = [
        f"{directory.path}: {state}, update {status.update} of {status.updates}",
        status.doing(state),
    ]
    if state != "in progress":
        return lines
    if status.published is None:
        lines.append("no weights are published yet")
    else:
        lines.append(f"versions: learner {status.trained}, published {status.published}")
    lines.append(_table(status, usage))
    lines += [f"{part.kind} {part.name}: {part.error}" for part in status.components if part.error]
    if status.message:
        lines.append(f"{time.time() - status.message_at:.0f} s ago: {status.message}")
    return lines


def _table(status: RunStatus, usage: _Usage) -> Table:
    table = make_table(*_COLUMNS, text=_COLUMNS[:2])
    for part in status.components:
        counts = ["" if n is None else f"{n:,}" for n in (part.running, part.waiting, part.sessions, part.version)]
        counts.insert(3, "" if part.cache is None else f"{part.cache:.0%}")
        table.add_row(part.kind, part.name, *counts, *usage.cells(part.process))
    table.add_row("process", "of the run", *[""] * 5, *usage.cells(status.process))
    return table


class _Usage:
    """CPU time and memory of processes on this machine between two looks, from Linux's `/proc`; elsewhere nothing."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}  # pid -> (when, CPU seconds)

    def cells(self, process: ProcessId | None) -> tuple[str, str]:
        """Return `("53%", "812 MB")`; nothing for a process on another machine, or that has ended."""
        if process is None or process.host != socket.gethostname():
            return "", ""
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "", ""
        words = stat.rpartition(")")[2].split()
        now, seconds = time.monotonic(), (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        then, before = self._before.get(process.pid, (now, seconds))
        self._before[process.pid] = now, seconds
        share = (seconds - before) / (now - then) if now > then else 0.0
        return f"{share:.0%}", f"{int(words[21]) * os.sysconf('SC_PAGE_SIZE') / 1e6:,.0f} MB"
