"""Two evaluations, of one run or of two, task by task: what was gained, what was lost."""

from __future__ import annotations

import json
import re
from typing import Any

from treadle.core.errors import RunError
from treadle.core.outcomes import given
from treadle.view.groups import group_rows
from treadle.view.models import Evaluation, GroupRow, TaskChange, TaskChanges
from treadle.view.recorded_run import RecordedRun

_NAME = re.compile(r"e(\d+)(g?)(?:r(\d+))?")


def compare_tasks(
    before: RecordedRun, after: RecordedRun, first: str | None = None, second: str | None = None
) -> TaskChanges:
    """Compare the evaluation `first` of one run with `second` of another, or of the same. Raises RunError.

    By default they are the first one of `before` and the last one of `after` that is of the same kind.
    """
    firsts, seconds = evaluations_of(before), evaluations_of(after)
    old = _chosen(firsts, first, before) if first or not firsts else firsts[0]
    alike = [other for other in seconds if other.is_greedy == old.is_greedy]
    new = _chosen(seconds, second, after) if second or not alike else alike[-1]
    changes = TaskChanges(before=firsts, after=seconds, first=old.name, second=new.name)
    old_rows, new_rows = _tasks(before, old.name), _tasks(after, new.name)
    for task_id, (prompt, row) in new_rows.items():
        if task_id not in old_rows or old_rows[task_id][0] != prompt:
            changes.only_after += 1
            continue
        was = old_rows[task_id][1]
        shares = _solved(before, was), _solved(after, row)
        change = "unchanged" if shares[0] == shares[1] else "gained" if shares[1] > shares[0] else "lost"
        changes.rows.append(TaskChange(change=change, solved=shares, before=was, after=row))
    changes.only_before = len(old_rows) - len(changes.rows)
    return changes


def evaluations_of(run: RecordedRun) -> list[Evaluation]:
    """Return the evaluations that the ledger holds, the oldest first. Raises RunError."""
    evaluations = []
    for name in run.ledger.evaluations():
        if (parts := _NAME.fullmatch(name)) is not None:
            label = f"update {int(parts[1])}{', greedy' if parts[2] else ''}"
            label += f", repeated: {parts[3]}" if parts[3] else ""
            evaluations.append(Evaluation(name=name, label=label, is_greedy=bool(parts[2])))
    return evaluations


def _chosen(evaluations: list[Evaluation], name: str | None, run: RecordedRun) -> Evaluation:
    for evaluation in evaluations:
        if evaluation.name == name:
            return evaluation
    names = ", ".join(evaluation.name for evaluation in evaluations) or "none"
    raise RunError(f"run {run.key!r} has no evaluation {name or 'of this kind'}; it has {names}")


def _tasks(run: RecordedRun, name: str) -> dict[str, tuple[Any, GroupRow]]:
    """Return task_id -> what was asked, and its group."""
    rows = run.ledger.evaluated_groups(name)
    prompts = [json.loads(row["task"]).get("prompt") for row in rows]
    return {row.task_id: (prompt, row) for prompt, row in zip(prompts, group_rows(run, rows), strict=True)}


def _solved(run: RecordedRun, row: GroupRow) -> float:
    """Return the share of a task's attempts that succeeded; those without a reward did not."""
    section = run.config().evaluation
    reached = [given(attempt.reward, attempt.components, section.success_of) for attempt in row.attempts]
    return sum(r is not None and r >= section.success_at for r in reached) / len(reached) if reached else 0.0
