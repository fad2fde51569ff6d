"""How a run shows a person where it is. The terminal's live version lives in `cli`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

from treadle.core.text import escape_line
from treadle.orchestration.reporting.callbacks import Callback
from treadle.orchestration.reporting.metrics import EvaluationResult, shown


class Progress(Protocol):
    """Shows a run to a person; its methods must return at once."""

    def log(self, line: str) -> None:
        """Show a line that is worth keeping."""
        ...

    def phase(self, name: str, total: int) -> None:
        """Begin a phase of `total` equal pieces (warm start, rollout, evaluation, ...)."""
        ...

    def advance(self, done: int, note: str = "") -> None:
        """Show that `done` pieces of the phase are done. note: a few words beside it."""
        ...

    def updated(self, row: Mapping[str, Any], updates: int) -> None:
        """Show an optimizer update; `row` is its line of metrics.jsonl. updates: of the whole run."""
        ...

    def evaluated(self, result: EvaluationResult) -> None:
        """Show the result of an evaluation on the held-out tasks."""
        ...


def update_line(row: Mapping[str, Any], updates: int, width: float = math.inf) -> str:
    """Return `update 37/200  reward 0.61 ...`: the figures a person watches, the most important ones first.

    width: in columns; figures that do not fit are left out, failures never.
    """
    gap = row.get("logprob_gap_max")  # not of every update
    figures = [
        f"update {row['update']:>{len(str(updates))}}/{updates}",
        f"reward {shown(row['reward_mean'])}",
        f"success {shown(row['success'])}",
        f"steps {shown(row['steps_mean'], 2)}",
        f"tokens {shown(row['completion_tokens_mean'], 1)}",
        f"entropy {shown(row['entropy'])}",
        f"gap {'-' if gap is None else f'{gap:.0e}'}",
        f"rollout {row['seconds_rollout']:.2f}s",
        f"update {row['seconds_update']:.2f}s",
    ]
    failed = [f"FAILED {row['failed']}/{row['trajectories']}"] if row["failed"] else []
    while len(line := "  ".join([*figures, *failed])) > width and len(figures) > 1:
        figures.pop()
    return line


def evaluation_lines(result: EvaluationResult, table_by: str | None = None, width: float = math.inf) -> list[str]:
    """Return `held-out success 0.412 (512 tasks, temperature 1, after 50 updates)  hops 1: 0.903  2: 0.251`.

    table_by: what the result's parts are by. width: in columns; what does not fit goes into further lines, whole.
    """
    how = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    failed = f", {result.failed} failed" if result.failed else ""
    tasks = f"{result.tasks} tasks" + (f" x {result.attempts}" if result.attempts > 1 else "")
    passes = [f"pass@{k} {shown(value)}" for k, value in result.pass_at.items() if k != "1"]
    by = [f"{key}: {shown(value)}" for key, value in result.by.items()]
    if by and table_by:
        by[0] = f"{table_by} {by[0]}"
    lines = [f"held-out success {shown(result.success)} ({tasks}{failed}, {how}, after {result.update} updates)"]
    for part in (*passes, *by):
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"  {part}")
    return lines


class PlainProgress:
    """Prints plain lines, for logs and scripts: the updates, and a phase's progress after a while without a line.

    interval: seconds without a line after which a phase's progress gets one. table_by: what evaluations are split by.
    """

    def __init__(self, table_by: str | None = None, interval: float = 30.0) -> None:
        self._table_by, self._interval = table_by, interval
        self._last = -math.inf  # when something was printed
        self._name, self._total = "", 0

    def log(self, line: str) -> None:
        self._print(line)

    def phase(self, name: str, total: int) -> None:
        """Begin a phase, whose progress `advance` prints."""
        self._name, self._total = name, total

    def advance(self, done: int, note: str = "") -> None:
        """Print the share done, if nothing was printed for long."""
        if time.monotonic() - self._last >= self._interval:
            self._print(f"{self._name} {done}/{self._total} {note}".rstrip())

    def updated(self, row: Mapping[str, Any], updates: int) -> None:
        self._print(update_line(row, updates))

    def evaluated(self, result: EvaluationResult) -> None:
        self._print(*evaluation_lines(result, self._table_by))

    def _print(self, line: str) -> None:
        self._last = time.monotonic()
        print(escape_line(line), flush=True)  # noqa: T201


class ProgressCallback(Callback):
    """Shows a run's events by a `Progress`. updates: of the whole run."""

    def __init__(self, progress: Progress, updates: int) -> None:
        self._progress, self._updates = progress, updates

    def phase(self, name: str, done: int, total: int) -> None:
        """Begin the phase, or advance it."""
        if done == 0:
            self._progress.phase(name, total)
        else:
            self._progress.advance(done)

    def message(self, line: str) -> None:
        self._progress.log(line)

    def update(self, row: Mapping[str, Any]) -> None:
        self._progress.updated(row, self._updates)

    def evaluate(self, result: EvaluationResult) -> None:
        self._progress.evaluated(result)
