"""The table of groups, with their attempts."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import BaseModel, Field

from treadle.core.errors import Cause, RunError
from treadle.core.text import escape_line
from treadle.core.types import PLAYERS, DropReason, Status, StepState
from treadle.orchestration.store.group_search import find_groups
from treadle.view.models import Attempt, GroupRow, Json
from treadle.view.recorded_run import LARGEST, RecordedRun, Run
from treadle.view.texts import clipped

Split = Literal["train", "held_out"]
Preset = Literal["failed", "dropped", "stale", "zero_advantage", "mixed", "unsolved", "warning", "blocked"]
Sort = Literal["group", "update", "task", "reward", "spread", "steps", "tokens", "failed", "seconds", "component"]
Words = Annotated[str, Field(max_length=200)]


class GroupQuery(BaseModel):
    """Which groups to list, in which order, and which page of them.

    search: words that the task, an id or a failure must all contain. reason, cause, status: of a step or an attempt of
    the group. component: of the reward, for that order. around: a group whose neighbors are named.
    """

    split: Split | None = None
    preset: Preset | None = None
    reason: DropReason | None = None
    cause: Cause | None = None
    status: Status | None = None
    search: Words = ""
    update: int | None = Field(None, ge=0, le=LARGEST)
    sort: Sort = "group"
    component: Words = ""
    descending: bool = True
    offset: int = Field(0, ge=0, le=LARGEST)
    limit: int = Field(100, ge=1, le=200)
    around: str | None = Field(None, max_length=1000)


_EVALUATION = re.compile(r"e(\d+)g?(?:r\d+)?-")  # r2: repeated for the second time
_QUESTION = 240  # characters of a question in the table


def list_groups(run: Run, query: Annotated[GroupQuery, Query()]) -> Json:
    """Return a page of the table, and the neighbors of `around`; total: groups that match. Raises RunError."""
    versions = [] if query.update is None else run.versions_of(query.update)
    page = find_groups(run.ledger, versions=versions, **query.model_dump())
    neighbors = {"previous": page.previous, "next": page.next}
    return {"total": page.total, "offset": query.offset, "rows": group_rows(run, page.rows), **neighbors}


def group_rows(run: RecordedRun, rows: Sequence[Mapping[str, Any]]) -> list[GroupRow]:
    """Return the lines of groups with their attempts, given their rows of the ledger."""
    names = [row["group_id"] for row in rows]
    states: dict[str, dict[str, int]] = defaultdict(dict)
    for row in run.ledger.attempts_states(names):
        name = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
        states[row["trajectory_id"]][name] = row["count"]
    members: dict[str, list[Attempt]] = defaultdict(list)
    for row in run.ledger.attempts(names):
        fields = {name: row[name] for name in Attempt.model_fields if name != "states"}
        fields |= {name: row[name] and clipped(row[name]) for name in ("failure_message", "warning")}
        fields |= {"components": json.loads(row["components"]), "states": states[row["trajectory_id"]]}
        members[row["group_id"]].append(Attempt(**fields))
    state = run.state()
    return [_group_row(run, row, members[row["group_id"]], state) for row in rows]


def _group_row(run: RecordedRun, row: Mapping[str, Any], attempts: list[Attempt], state: str) -> GroupRow:
    task = json.loads(row["task"])
    evaluated = _EVALUATION.match(row["group_id"]) if row["split"] != "train" else None
    version = row["trained_version"]
    update = int(evaluated[1]) if evaluated else run.update_of(version)
    return GroupRow(
        group_id=row["group_id"],
        split=row["split"],
        task_id=str(task.get("task_id", "")),
        question=_question(task),
        played_by=next((str(task[kind]) for kind in PLAYERS if task.get(kind)), ""),
        update=update,
        version=version if version is not None else row["batch"],
        when=f"update {update}" if update is not None else _no_update(version, attempts, state),
        attempts=attempts,
    )


def _no_update(version: int | None, attempts: Sequence[Attempt], state: str) -> str:
    """Return why a group of training is in no update. version: of the policy that trained it. state: of the run."""
    if version is not None:
        return f"an update of version {version} that metrics.jsonl does not name"
    ends = dict.fromkeys(end for attempt in attempts for end in attempt.states)
    if StepState.RECORDED in ends:
        return "no update yet" if state == "in progress" else "no update: the run stopped before it"
    reasons = [end.partition(": ")[2] for end in ends]
    return f"no update: {', '.join(filter(None, reasons)) or 'no step'}"


def _question(task: Mapping[str, Any]) -> str:
    """Return what a task asks, in a line: its last message of a user, or all its extras."""
    asked = [m.get("content") for m in task.get("prompt") or () if isinstance(m, dict) and m.get("role") == "user"]
    text = str(asked[-1]) if asked else json.dumps(task.get("extras") or {}, ensure_ascii=False)
    text = escape_line(" ".join(text[: 4 * _QUESTION].split()))
    return text if len(text) <= _QUESTION else f"{text[:_QUESTION]} …"


def groups_of_task(run: RecordedRun, task_id: str, split: str) -> list[GroupRow]:
    """Return all groups of a task, oldest first. Raises RunError if none is on record."""
    rows = run.ledger.groups_of_task(task_id, split)
    if not rows:
        raise RunError(f"no {split} task {task_id!r} in {run.path}")
    return group_rows(run, rows)
