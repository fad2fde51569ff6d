"""Two evaluations, of one run or of two, task by task: what was gained, what was lost."""

from __future__ import annotations

import json
import re
from typing import Any

from treadle.core.errors import RunError
from treadle.core.outcomes import given
from treadle.view.groups import group_rows
from treadle.view.models import GroupRow, Json
from treadle.view.recorded_run import RecordedRun

_NAME = re.compile(r"e(\d+)(g?)(?:r(\d+))?")


def compare_tasks(before: RecordedRun, after: RecordedRun, first: str | None = None, second: str | None = None) -> Json:
    """Compare the evaluation `first` of one run with `second` of another, or of the same. Raises RunError.

    By default they are the first one of `before` and the last one of `after` that is of the same kind. before, after:
    all evaluations to choose from. rows: each task's change (gained, lost, unchanged), share of attempts solved, and
    group, in both. only_before, only_after: number of tasks that only one of them has, or with another prompt.
    """
    firsts, seconds = evaluations_of(before), evaluations_of(after)
    old = _chosen(firsts, first, before) if first or not firsts else firsts[0]
    alike = [other for other in seconds if other["is_greedy"] == old["is_greedy"]]
    new = _chosen(seconds, second, after) if second or not alike else alike[-1]
    old_rows, new_rows = _tasks(before, old["name"]), _tasks(after, new["name"])
    rows = []
    for task_id, (prompt, row) in new_rows.items():
        if task_id in old_rows and old_rows[task_id][0] == prompt:
            was = old_rows[task_id][1]
            solved = _solved(before, was), _solved(after, row)
            change = "unchanged" if solved[0] == solved[1] else "gained" if solved[1] > solved[0] else "lost"
            rows.append({"change": change, "solved": solved, "before": was, "after": row})
    only = {"only_before": len(old_rows) - len(rows), "only_after": len(new_rows) - len(rows)}
    return {"before": firsts, "after": seconds, "first": old["name"], "second": new["name"], "rows": rows, **only}


def evaluations_of(run: RecordedRun) -> list[Json]:
    """Return the evaluations on record, the oldest first: name (prefix of group ids), label, is_greedy."""
    evaluations = []
    for name in run.ledger.evaluations():
        if (parts := _NAME.fullmatch(name)) is not None:
            repeated = f", repeated: {parts[3]}" if parts[3] else ""
            label = f"update {int(parts[1])}{', greedy' if parts[2] else ''}{repeated}"
            evaluations.append({"name": name, "label": label, "is_greedy": bool(parts[2])})
    return evaluations


def _chosen(evaluations: list[Json], name: str | None, run: RecordedRun) -> Json:
    for evaluation in evaluations:
        if evaluation["name"] == name:
            return evaluation
    names = ", ".join(evaluation["name"] for evaluation in evaluations) or "none"
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
