"""`Progress`: display of a run, in plain lines or in a notebook."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from treadle.core.text import escape_line
from treadle.report.callback import Callback
from treadle.report.metrics import EvaluationResult, shown, shown_passes
from treadle.rollout.isolation.interrupts import never_swallowed

EVERY = 10  # updates between permanent lines if a bar shows each
_REFRESH = 0.25  # seconds


class Progress(Callback):
    """Displays a run, or the work of another command; its methods must return immediately."""

    def log(self, line: str) -> None:
        """Show a permanent line."""

    def message(self, line: str) -> None:
        self.log(line)

    def phase(self, name: str, done: int, total: int, note: str = "") -> None:
        """Show the progress of a phase. note: a few words beside it."""

    def loading(self) -> None:
        """Announce the import of PyTorch, which takes seconds without another event."""


@contextmanager
def loading(progress: Progress) -> Iterator[None]:
    """Import PyTorch inside this context: it takes seconds, in which Ctrl-C is never lost."""
    progress.loading()
    with never_swallowed():
        yield


def update_line(row: Mapping[str, Any], updates: int, width: float = math.inf) -> str:
    """Return `update 37/200  reward 0.61 ...`, most important first, limited to `width` except for failures."""
    gap = row.get("logprob_gap_max")  # missing for some updates
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

    table_by: key of the result's parts. width: in columns; whole parts that do not fit go into further lines.
    """
    how = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    failed = f", {result.failed} failed" if result.failed else ""
    tasks = f"{result.tasks} tasks" + (f" x {result.attempts}" if result.attempts > 1 else "")
    passes = shown_passes(result.pass_at, result.pass_tasks)
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


class PlainProgress(Progress):
    """Prints plain lines, for logs and scripts: updates, and a phase's progress after a while without a line.

    updates: number in the whole run. table_by: key that evaluations are split by. interval: seconds without a line.
    """

    def __init__(self, updates: int = 0, table_by: str | None = None, interval: float = 30.0) -> None:
        self._updates, self._table_by, self._interval = updates, table_by, interval
        self._last = -math.inf  # time of the last line

    def log(self, line: str) -> None:
        self._last = time.monotonic()
        print(escape_line(line), flush=True)  # noqa: T201

    def loading(self) -> None:
        if "torch" not in sys.modules:
            self.log("loading PyTorch and transformers")
            self._last = -math.inf  # the first phase is shown immediately

    def phase(self, name: str, done: int, total: int, note: str = "") -> None:
        if done and time.monotonic() - self._last >= self._interval:
            self.log(f"{name} {done}/{total} {note}".rstrip())

    def update(self, row: Mapping[str, Any]) -> None:
        self.log(update_line(row, self._updates))

    def evaluate(self, result: EvaluationResult) -> None:
        self.log(*evaluation_lines(result, self._table_by))


class NotebookProgress(PlainProgress):
    """Prints like `PlainProgress`, every tenth update, and below it an updating line for the current phase."""

    def __init__(self, updates: int = 0, table_by: str | None = None) -> None:
        super().__init__(updates, table_by)
        self._done, self._figures, self._shown, self._length = 0, "", -math.inf, 0

    def log(self, line: str) -> None:
        self._show("")
        super().log(line)

    def phase(self, name: str, done: int, total: int, note: str = "") -> None:
        if done == 0 or time.monotonic() - self._shown >= _REFRESH:
            of_run = f"updates {self._done}/{self._updates} {_bar(self._done, self._updates)}" if self._updates else ""
            pieces = f"{done}/{total} {_bar(done, total)}" if total > 1 else ""
            self._show(escape_line("  ".join(filter(None, [of_run, self._figures, name, pieces, note]))))

    def update(self, row: Mapping[str, Any]) -> None:
        self._done = row["update"]
        self._figures = f"reward {shown(row['reward_mean'])}  success {shown(row['success'])}"
        if self._done % EVERY == 0 or self._done in (1, self._updates) or row["failed"]:
            super().update(row)

    def _show(self, text: str) -> None:
        """Overwrite the previous text, independent of the front end's handling of escape sequences."""
        if text or self._length:
            print(f"\r{text:<{self._length}}", end="" if text else "\r", flush=True)  # noqa: T201
        self._shown, self._length = time.monotonic(), len(text)


def _bar(done: int, total: int, width: int = 20) -> str:
    filled = width * done // max(total, 1)
    return "█" * filled + "░" * (width - filled)
