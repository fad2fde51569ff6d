"""How a run tells a person where it is. The terminal's live version lives in `cli`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from treadle.core.text import escape_line
from treadle.orchestration.metrics import EvaluationResult, shown


class Progress(Protocol):
    """Receives what happens; must return at once."""

    def say(self, line: str) -> None:
        """One line worth keeping."""
        ...

    def phase(self, name: str, total: int) -> None:
        """A phase of `total` equal pieces begins (warm start, rollout, evaluation, ...)."""
        ...

    def advance(self, done: int, note: str = "") -> None:
        """`done` pieces of the phase are done."""
        ...

    def updated(self, row: Mapping[str, Any], updates: int) -> None:
        """An optimizer update was made; `row` is its line of metrics.jsonl."""
        ...

    def evaluated(self, result: EvaluationResult) -> None:
        """Held-out tasks were played."""
        ...


def update_line(row: Mapping[str, Any], updates: int) -> str:
    """`update 37/200  reward 0.61 ...`: the figures a person watches."""
    gap = row["logprob_gap_max"]
    return (
        f"update {row['update']:>{len(str(updates))}}/{updates}  "
        f"reward {shown(row['reward_mean'])}  success {shown(row['success'])}  "
        f"steps {shown(row['steps_mean'], 2)}  tokens {shown(row['completion_tokens_mean'], 1)}  "
        f"entropy {shown(row['entropy'])}  gap {'-' if gap is None else f'{gap:.0e}'}  "
        f"rollout {row['seconds_rollout']:.2f}s  update {row['seconds_update']:.2f}s"
        + (f"  FAILED {row['failed']}/{row['trajectories']}" if row["failed"] else "")
    )


def evaluation_line(result: EvaluationResult) -> str:
    """`held-out success 0.412 (512 tasks, temperature 1, after 50 updates)  1: 0.9 ...`."""
    by = "  ".join(f"{key}: {shown(value)}" for key, value in result.by.items())
    how = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    failed = f", {result.failed} failed" if result.failed else ""
    tasks = f"{result.tasks} tasks" + (f" x {result.attempts}" if result.attempts > 1 else "")
    by = "  ".join([*(f"pass@{k} {shown(value)}" for k, value in result.pass_at.items() if k != "1"), by])
    played = f"{tasks}{failed}, {how}, after {result.update} updates"
    return f"held-out success {shown(result.success)} ({played})  {by}".rstrip()


class PlainProgress:
    """Plain lines, at most one a `interval` seconds for updates and phases; for logs and scripts."""

    def __init__(self, interval: float = 10.0) -> None:
        self._interval, self._last = interval, 0.0
        self._name, self._total = "", 0

    def say(self, line: str) -> None:
        """Print it."""
        _print(line)

    def phase(self, name: str, total: int) -> None:
        """Remember it for `advance`."""
        self._name, self._total = name, total

    def advance(self, done: int, note: str = "") -> None:
        """Print the share done, now and then."""
        if self._due():
            _print(f"{self._name} {done}/{self._total} {note}".rstrip())

    def updated(self, row: Mapping[str, Any], updates: int) -> None:
        """Print the update's line, now and then, and the last one always."""
        if self._due() or row["update"] == updates:
            _print(update_line(row, updates))

    def evaluated(self, result: EvaluationResult) -> None:
        """Print the result."""
        _print(evaluation_line(result))

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._interval:
            return False
        self._last = now
        return True


def _print(line: str) -> None:
    print(escape_line(line), flush=True)  # noqa: T201
