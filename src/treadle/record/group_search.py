"""The viewer's table of groups: filtered, sorted and paged in the ledger, so that only the shown rows are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from treadle.core.errors import Cause
from treadle.core.types import DropReason, Status
from treadle.record.ledger_reader import PLACES, LedgerReader

Split = Literal["train", "held_out"]
Preset = Literal["failed", "dropped", "stale", "zero_advantage", "mixed", "unsolved", "warning", "blocked"]
Sort = Literal["group", "update", "task", "reward", "spread", "steps", "tokens", "failed", "seconds", "component"]
Words = Annotated[str, Field(max_length=200)]
LARGEST = 2**31 - 1

_ATTEMPTS = "groups.group_id IN (SELECT group_id FROM trajectories WHERE"
_STEPS = f"{_ATTEMPTS} trajectory_id IN (SELECT trajectory_id FROM steps WHERE"
_BY_GROUP = "groups.group_id IN (SELECT group_id FROM trajectories GROUP BY group_id HAVING"
_PRESETS: Mapping[str, str] = {
    "failed": f"{_ATTEMPTS} failure_cause IS NOT NULL)",
    "dropped": f"{_STEPS} state = 'dropped'))",
    "stale": f"{_STEPS} reason = 'stale'))",
    "zero_advantage": f"{_BY_GROUP} max(abs(advantage)) = 0) OR {_STEPS} reason = 'filtered'))",
    "mixed": f"{_BY_GROUP} max(reward) > min(reward))",
    "unsolved": f"{_BY_GROUP} max(reward) <= 0)",
    "warning": f"{_ATTEMPTS} warning != '')",
    "blocked": f"{_ATTEMPTS} blocked_seconds > 0)",
}
"""Name of a filter -> its condition on a row of `groups`."""
_HAVING = {
    "reason": f"{_STEPS} reason = ?))",
    "cause": f"{_ATTEMPTS} failure_cause = ?)",
    "status": f"{_ATTEMPTS} status = ?)",
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
_COLUMNS = {"group": "p.place", "update": "coalesce(trained_version, batch)", "task": "position"}
_WORD = (  # the first condition is fast, and implied by the second
    "((instr(lower(task), lower(?)) AND EXISTS (SELECT 1 FROM json_tree(task) WHERE type IN ('text', 'integer', "
    "'real') AND coalesce(key, '') NOT IN ('role', 'type') AND instr(lower(atom), lower(?)))) "
    "OR instr(groups.group_id, ?) OR groups.group_id IN (SELECT group_id FROM "
    "trajectories WHERE instr(lower(failure_message), lower(?)) OR instr(trajectory_id, ?)))"
)


class GroupQuery(BaseModel):
    """Selection, order and page of groups to list.

    search: words that must all occur in the task, an id or a failure. reason, cause, status: of a step or an attempt in
    the group. component: reward component for that order. around: group with neighbors to report.
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


def find_groups(ledger: LedgerReader, query: GroupQuery, versions: Sequence[int]) -> dict[str, Any]:
    """Return a page of the table: `rows` of `total`, and the neighbors `previous` and `next` of the group `around`.

    versions: policy versions that trained `query.update`. Raises RunError.
    """
    where, values = ["1"], list[Any]()
    if query.split is not None:
        where.append("split = ?")
        values.append(query.split)
    if query.preset is not None:
        where.append(f"({_PRESETS[query.preset]})")
    for name, condition in _HAVING.items():
        if (value := getattr(query, name)) is not None:
            where.append(condition)
            values.append(value)
    if query.update is not None:
        where.append("(trained_version IN (SELECT value FROM json_each(?)) OR groups.group_id GLOB ?)")
        values += [json.dumps(versions), f"e{query.update:06d}*"]
    for word in query.search.split():
        where.append(_WORD)
        values += [json.dumps(word)[1:-1], *[word] * 4]
    of_attempts = "(SELECT {} FROM trajectories WHERE trajectories.group_id = groups.group_id)"
    by = _COLUMNS.get(query.sort) or of_attempts.format(_SUMS[query.sort])
    way, all_of_them = "DESC" if query.descending else "ASC", " AND ".join(where)
    total = ledger.query(f"SELECT count(*) AS total FROM groups WHERE {all_of_them}", *values)[0]["total"]
    rest = f"JOIN ({PLACES}) p USING (group_id) WHERE {all_of_them} ORDER BY {by} {way} NULLS LAST, p.place {way}"
    values += [query.component] * by.count("?")
    rows = ledger.query(f"SELECT groups.* FROM groups {rest} LIMIT ? OFFSET ?", *values, query.limit, query.offset)
    page = {"total": total, "offset": query.offset, "rows": rows, "previous": None, "next": None}
    if query.around is not None:
        ids = ledger.query(f"SELECT groups.group_id FROM groups {rest}", *values)
        names = [None, *(row["group_id"] for row in ids), None]
        if query.around in names:
            at = names.index(query.around)
            page |= {"previous": names[at - 1], "next": names[at + 1]}
    return page
