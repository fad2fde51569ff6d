"""The table of groups: filtered, sorted and cut in the ledger, so that only what is shown is read."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from treadle.core.errors import Cause, RunError
from treadle.core.text import escape_line
from treadle.core.types import PLAYERS, DropReason, Status, StepState
from treadle.view.models import Attempt, GroupRow, Groups
from treadle.view.recorded_run import RecordedRun
from treadle.view.texts import clipped

LARGEST = 2**31 - 1
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


_OF_ATTEMPTS = "g.group_id IN (SELECT group_id FROM trajectories WHERE"
_OF_STEPS = f"{_OF_ATTEMPTS} trajectory_id IN (SELECT trajectory_id FROM steps WHERE"
_BY_GROUP = "g.group_id IN (SELECT group_id FROM trajectories GROUP BY group_id HAVING"
_PRESETS: Mapping[Preset, str] = {
    "failed": f"{_OF_ATTEMPTS} failure_cause IS NOT NULL)",
    "dropped": f"{_OF_STEPS} state = 'dropped'))",
    "stale": f"{_OF_STEPS} reason = 'stale'))",
    "zero_advantage": f"{_BY_GROUP} max(abs(advantage)) = 0) OR {_OF_STEPS} reason = 'filtered'))",
    "mixed": f"{_BY_GROUP} max(reward) > min(reward))",
    "unsolved": f"{_BY_GROUP} max(reward) <= 0)",
    "warning": f"{_OF_ATTEMPTS} warning != '')",
    "blocked": f"{_OF_ATTEMPTS} blocked_seconds > 0)",
}
"""Conditions on a group `g`."""
_HAVING = {
    "reason": f"{_OF_STEPS} reason = ?))",
    "cause": f"{_OF_ATTEMPTS} failure_cause = ?)",
    "status": f"{_OF_ATTEMPTS} status = ?)",
}

_SUMS = {
    "reward": "avg(reward)",
    "spread": "max(reward) - min(reward)",
    "steps": "avg(steps)",
    "tokens": "sum(completion_tokens)",
    "failed": "count(failure_cause)",
    "seconds": "max(seconds)",
    "component": "avg(iif(reward IS NULL, NULL, coalesce((SELECT value FROM json_each(components) WHERE key = ?), 0)))",
}
_COLUMNS = {"group": "g.rowid", "update": "coalesce(g.trained_version, g.batch)", "task": "g.position"}

_TASK_SAYS = (  # the first condition is quick, and holds wherever the second does
    "instr(lower(g.task), lower(?)) AND EXISTS (SELECT 1 FROM json_tree(g.task) WHERE type IN ('text', 'integer', "
    "'real') AND coalesce(key, '') NOT IN ('role', 'type') AND instr(lower(atom), lower(?)))"
)
_EVALUATION = re.compile(r"e(\d+)g?(?:r\d+)?-")  # r2: repeated for the second time
_MOST_CHARACTERS = 240  # of a question in the table


def list_groups(run: RecordedRun, query: GroupQuery) -> Groups:
    """Return a page of the table. Raises RunError."""
    where, values = ["1"], list[Any]()
    if query.split is not None:
        where.append("g.split = ?")
        values.append(query.split)
    if query.preset is not None:
        where.append(f"({_PRESETS[query.preset]})")
    for name, condition in _HAVING.items():
        if (value := getattr(query, name)) is not None:
            where.append(condition)
            values.append(str(value))
    if query.update is not None:
        where.append("(g.trained_version IN (SELECT value FROM json_each(?)) OR g.group_id GLOB ?)")
        values += [json.dumps(run.versions_of(query.update)), f"e{query.update:06d}*"]
    for word in query.search.split():
        where.append(
            f"(({_TASK_SAYS}) OR instr(g.group_id, ?) OR g.group_id IN (SELECT group_id FROM "
            "trajectories WHERE instr(lower(failure_message), lower(?)) OR instr(trajectory_id, ?)))"
        )
        values += [json.dumps(word)[1:-1], *[word] * 4]
    condition = " AND ".join(where)
    by, joined, of_join = _COLUMNS.get(query.sort, "a.figure"), "", list[str]()
    if query.sort in _SUMS:
        figures = f"SELECT group_id, {_SUMS[query.sort]} AS figure FROM trajectories GROUP BY group_id"
        joined, of_join = f"JOIN ({figures}) a USING (group_id)", [query.component] * figures.count("?")
    way = "DESC" if query.descending else "ASC"
    total = run.ledger.query(f"SELECT count(*) AS total FROM groups g WHERE {condition}", *values)[0]["total"]
    table = f"FROM groups g {joined} WHERE {condition} ORDER BY {by} {way} NULLS LAST, g.rowid {way}"
    rows = run.ledger.query(f"SELECT g.* {table} LIMIT ? OFFSET ?", *of_join, *values, query.limit, query.offset)
    page = Groups(total=total, offset=query.offset, rows=group_rows(run, rows))
    if query.around is not None:
        names = [row["group_id"] for row in run.ledger.query(f"SELECT g.group_id {table}", *of_join, *values)]
        at = names.index(query.around) if query.around in names else len(names)
        page.previous = names[at - 1] if 0 < at < len(names) else None
        page.next = names[at + 1] if at + 1 < len(names) else None
    return page


def group_rows(run: RecordedRun, rows: Sequence[Mapping[str, Any]]) -> list[GroupRow]:
    """Return the lines of groups, given their rows of the ledger, with their attempts."""
    names = json.dumps([row["group_id"] for row in rows])
    trajectories = run.ledger.query(
        "SELECT * FROM trajectories WHERE group_id IN (SELECT value FROM json_each(?)) ORDER BY attempt", names
    )
    states: dict[str, dict[str, int]] = defaultdict(dict)
    for row in run.ledger.query(
        "SELECT trajectory_id, state, reason, count(*) AS count FROM steps WHERE trajectory_id IN (SELECT "
        "trajectory_id FROM trajectories WHERE group_id IN (SELECT value FROM json_each(?))) GROUP BY 1, 2, 3",
        names,
    ):
        name = f"{row['state']}: {row['reason']}" if row["reason"] else row["state"]
        states[row["trajectory_id"]][name] = row["count"]
    members: dict[str, list[Attempt]] = defaultdict(list)
    for row in trajectories:
        members[row["group_id"]].append(attempt_of(row, states[row["trajectory_id"]]))
    state = run.state()
    return [_group_row(run, row, members[row["group_id"]], state) for row in rows]


def attempt_of(row: Mapping[str, Any], states: dict[str, int]) -> Attempt:
    """Return an attempt, given its row of the ledger and how many of its steps ended how."""
    fields = {name: row[name] for name in Attempt.model_fields if name != "states"}
    texts = {name: row[name] and clipped(row[name]) for name in ("failure_message", "warning")}
    return Attempt(**{**fields, **texts, "components": _json(row["components"]), "states": states})


def _group_row(run: RecordedRun, row: Mapping[str, Any], attempts: list[Attempt], state: str) -> GroupRow:
    task = _json(row["task"])
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
    text = escape_line(" ".join(text[: 4 * _MOST_CHARACTERS].split()))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"


def _json(text: str) -> dict[str, Any]:
    """Return a JSON object of the ledger; an empty one for anything else, such as a row of an older version."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def groups_of_task(run: RecordedRun, task_id: str, split: str) -> list[GroupRow]:
    """Return all groups of a task, oldest first. Raises RunError if none is on record."""
    rows = run.ledger.query(
        "SELECT * FROM groups WHERE split = ? AND instr(task, ?) AND json_extract(task, '$.task_id') = ? "
        "ORDER BY rowid",
        split,
        json.dumps(task_id)[1:-1],
        task_id,
    )
    if not rows:
        raise RunError(f"no {split} task {task_id!r} in {run.path}")
    return group_rows(run, rows)
