"""`treadle top`."""

from __future__ import annotations

import argparse
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.cli.console import Console, Table, make_table
from treadle.cli.options import Commands, add_command

if TYPE_CHECKING:
    from treadle.core.status import ComponentStatus, ProcessId
    from treadle.orchestration.reporting.live_status import RunStatus
    from treadle.orchestration.store.run_directory import RunDirectory

_EXAMPLES = """examples:
  treadle top runs/demo             a live table, until the run ends or Ctrl-C
  treadle top runs/demo --once      as it is now

  running, waiting   calls, attempts or groups that are worked on, and that have come and are not begun
  sessions           attempts that an engine keeps its cache for
  cache              share of its KV cache that holds tokens
  version            of the policy that it serves
  CPU, memory        of its process, where that is on this machine: 100% is one core
"""
_PERIOD = 1.0  # seconds between two looks
_SAMPLE = 0.3  # seconds over which the first look measures CPU time
_STALE = 10.0  # seconds without a word from a run that is in progress after which that is said
_TICKS = os.sysconf("SC_CLK_TCK")
_COLUMNS = ("component", "", "running", "waiting", "sessions", "cache", "version", "CPU", "memory")


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "top", run, "show what a run does now: learner, engines, rollouts", _EXAMPLES)
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--once", action="store_true", help="print it once; so it is where there is no terminal, too")


def run(options: argparse.Namespace) -> int:
    """Show the table until the run ends or Ctrl-C; returns 0. Raises RunError for a directory that is no run."""
    from treadle.orchestration.store.run_directory import RunDirectory

    directory, console, usage = RunDirectory.open(options.run_directory), Console(), _Usage()
    try:
        usage.percent(_look(directory))
        time.sleep(_SAMPLE)
        if not options.once and console.is_terminal and directory.state() == "in progress":
            with console.live() as show:
                while directory.state() == "in progress":
                    show(_view(directory, usage))
                    time.sleep(_PERIOD)
        for part in _view(directory, usage):
            console.line(part) if isinstance(part, str) else console.table(part)
    except KeyboardInterrupt:
        pass
    return 0


def _look(directory: RunDirectory) -> RunStatus | None:
    from treadle.orchestration.reporting.live_status import RunStatus

    return RunStatus.read(directory.status_file)


def _view(directory: RunDirectory, usage: _Usage) -> list[str | Table]:
    """Return what is shown: lines, and a table while the run is in progress."""
    state, status = directory.state(), _look(directory)
    if status is None:
        return [f"{directory.path}: {state}; it has no status.json: it has only begun, or an earlier version made it"]
    lines: list[str | Table] = [f"{directory.path}: {_headline(state, status)}"]
    if state != "in progress":
        return [*lines, *_ending(state, status)]
    lines += [_phase(status), _versions(status)]
    if (silent := time.time() - status.written) > _STALE:
        lines.append(f"no status for {silent:.0f} s: the run's process may be stopped, or its disk full")
    lines += [_table(status, usage.percent(status))]
    lines += [f"{part.kind} {part.name}: {part.error}" for part in status.components if part.error]
    if status.message:
        lines.append(f"{time.time() - status.message_at:.0f} s ago: {status.message}")
    return lines


def _headline(state: str, status: RunStatus) -> str:
    return f"{state}, update {status.update} of {status.updates}"


def _ending(state: str, status: RunStatus) -> list[str]:
    ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.written))
    if status.error:
        return [f"it ended at {ended}: {status.error}"]
    if state == "finished" or not status.phase:
        return [f"it ended at {ended}"]
    return [f"last status at {ended}, during {status.phase}"]


def _phase(status: RunStatus) -> str:
    pieces = f" {status.done}/{status.total}" if status.total > 1 else ""
    return f"{status.phase}{pieces} for {time.time() - status.since:.0f} s"


def _versions(status: RunStatus) -> str:
    if status.published is None:
        return "no weights are published yet"
    return f"versions: learner {status.trained}, published {status.published}"


def _table(status: RunStatus, usage: _Measured) -> Table:
    table = make_table(*_COLUMNS, text=_COLUMNS[:2])
    for part in status.components:
        table.add_row(part.kind, part.name, *_figures(part), *usage.cells(part.process))
    table.add_row("process", "of the run", *[""] * 5, *usage.cells(status.process))
    return table


def _figures(part: ComponentStatus) -> list[str]:
    counts = [_shown(part.running), _shown(part.waiting), _shown(part.sessions)]
    return [*counts, "" if part.cache is None else f"{part.cache:.0%}", _shown(part.version)]


def _shown(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


@dataclass(frozen=True, slots=True)
class _Measured:
    """CPU use and memory of processes on this machine: pid -> (share of a core, bytes)."""

    of: dict[int, tuple[float, int]]

    def cells(self, process: ProcessId | None) -> list[str]:
        """Return both as text; nothing of a process elsewhere, or that has ended."""
        if process is None or process.host != socket.gethostname() or process.pid not in self.of:
            return ["", ""]
        share, memory = self.of[process.pid]
        return [f"{share:.0%}", f"{memory / 1e6:,.0f} MB"]


class _Usage:
    """Measures processes of this machine from one look to the next, by Linux' `/proc`; elsewhere nothing."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}  # pid -> (when, CPU seconds)

    def percent(self, status: RunStatus | None) -> _Measured:
        """Return the use of the processes that the status names since the last call."""
        found: dict[int, tuple[float, int]] = {}
        processes = [] if status is None else [status.process, *(p.process for p in status.components if p.process)]
        for pid in {process.pid for process in processes if process.host == socket.gethostname()}:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            except OSError:  # it has ended, or this is not Linux
                continue
            words = fields.split()
            now, seconds = time.monotonic(), (int(words[11]) + int(words[12])) / _TICKS
            before, had = self._before.get(pid, (now, seconds))
            self._before[pid] = now, seconds
            share = (seconds - had) / (now - before) if now > before else 0.0
            found[pid] = share, int(words[21]) * os.sysconf("SC_PAGE_SIZE")
        return _Measured(found)
