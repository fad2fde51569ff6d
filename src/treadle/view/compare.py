"""Runs side by side: differences of their configurations, and gains and losses of evaluations, task by task."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from treadle.core.config import as_override
from treadle.core.config_diff import leaves
from treadle.core.errors import RunError, TreadleError
from treadle.core.metrics import Figure
from treadle.core.outcomes import given
from treadle.core.types import role_of
from treadle.report.curve import RunMetrics, group_runs
from treadle.report.metrics import mean
from treadle.view.groups import GroupRow, group_rows
from treadle.view.recorded_run import RecordedRun
from treadle.view.texts import Json


def compare(runs: Sequence[RecordedRun]) -> Json:
    """Return the groups of the runs as in `treadle plot`, and all settings that differ.

    groups: run keys, and `settings` that distinguish them from the others, with `hidden` further ones; runs with an
    unreadable configuration have separate groups without settings and values.
    differences: path and the value of each run; None if the run has no such setting, "" if its mapping lacks the key.
    """
    readable: list[tuple[str, RunMetrics]] = []
    groups, differences, problems = [], [], []
    for run in runs:
        try:
            readable.append((run.key, RunMetrics(leaves(run.config()), run.metrics().rows)))
        except TreadleError as error:
            problems.append(str(error))
            groups.append({"settings": (), "runs": [run.key]})
    key_of = {id(metrics): key for key, metrics in readable}
    grouped = group_runs(metrics for _, metrics in readable)
    for group in grouped:
        keys = [key_of[id(metrics)] for metrics in group.runs]
        groups.append({"settings": group.settings, "runs": keys})
    settings = {key: metrics.settings for key, metrics in readable}
    for path in dict.fromkeys(path for paths in settings.values() for path in paths):
        opened = {key: dict(_opened(path, paths[path])) for key, paths in settings.items() if path in paths}
        for name in dict.fromkeys(name for paths in opened.values() for name in paths):
            values = [opened[run.key].get(name, "") if run.key in opened else None for run in runs]
            if len({value for run, value in zip(runs, values, strict=True) if run.key in settings}) > 1:
                differences.append({"path": name, "values": values})
    hidden = grouped[0].hidden if grouped else 0
    found = {"groups": groups, "hidden": hidden, "differences": differences, "problems": problems}
    return {"runs": [run.key for run in runs], **found}


def _opened(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield a setting; for a mapping such as `model.build`, each of its entries."""
    if isinstance(value, dict) and value:
        for key, entry in value.items():
            yield from _opened(f"{path}.{key}", entry)
    else:
        yield path, as_override(value)


_NAME = re.compile(r"e(\d+)(g?)(?:r(\d+))?")


def compare_tasks(before: RecordedRun, after: RecordedRun, first: str | None = None, second: str | None = None) -> Json:
    """Compare the evaluation `first` of one run with `second` of another, or of the same. Raises RunError.

    By default they are the first one of `before` and the last one of `after` of the same kind. before, after: all
    evaluations to choose from. rows: per task, the change (gained, lost, unchanged; ungraded, if one of them has no
    attempt with a reward), share of successful graded attempts, and group, in both. only_before, only_after: number of
    tasks missing in the other, or with another prompt there.
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
            rows.append({"change": _change(*solved), "solved": solved, "before": was, "after": row})
    only = {"only_before": len(old_rows) - len(rows), "only_after": len(new_rows) - len(rows)}
    return {"before": firsts, "after": seconds, "first": old["name"], "second": new["name"], "rows": rows, **only}


def evaluations_of(run: RecordedRun) -> list[Json]:
    """Return the recorded evaluations, oldest first: name (prefix of group ids), label, is_greedy."""
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
    rows = run.ledger.evaluated_groups(name)
    prompts = [json.loads(row["task"]).get("prompt") for row in rows]
    return {row.task_id: (prompt, row) for prompt, row in zip(prompts, group_rows(run, rows), strict=True)}


def _change(before: Figure, after: Figure) -> str:
    if before is None or after is None:
        return "ungraded"
    return "unchanged" if before == after else "gained" if after > before else "lost"


def _solved(run: RecordedRun, row: GroupRow) -> Figure:
    """Return the share of a task's graded attempts that succeeded; None without any."""
    section = run.config().evaluation
    reached = [
        given(attempt.reward, attempt.components, section.success_of)
        for attempt in row.attempts
        if not role_of(attempt.trajectory_id) and attempt.reward is not None
    ]
    return mean([r is not None and r >= section.success_at for r in reached])
