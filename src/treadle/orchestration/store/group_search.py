"""The viewer's table of groups: filtered, sorted and cut in the ledger, so that only what is shown is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.orchestration.store.ledger_reader import LedgerReader

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
_COLUMNS = {
    "group": "groups.rowid",
    "update": "coalesce(trained_version, batch)",
    "task": "position",
}
_WORD = (  # the first condition is quick, and holds wherever the second does
    "((instr(lower(task), lower(?)) AND EXISTS (SELECT 1 FROM json_tree(task) WHERE type IN ('text', 'integer', "
    "'real') AND coalesce(key, '') NOT IN ('role', 'type') AND instr(lower(atom), lower(?)))) "
    "OR instr(groups.group_id, ?) OR groups.group_id IN (SELECT group_id FROM "
    "trajectories WHERE instr(lower(failure_message), lower(?)) OR instr(trajectory_id, ?)))"
)


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Part of the table. total: groups that meet the conditions. previous, next: of the group `around`."""

    total: int
    rows: list[dict[str, Any]]
    previous: str | None = None
    next: str | None = None


def find_groups(
    ledger: LedgerReader,
    *,
    split: str | None,
    preset: str | None,
    search: str,
    update: int | None,
    versions: Sequence[int],
    sort: str,
    component: str,
    descending: bool,
    offset: int,
    limit: int,
    around: str | None = None,
    **having: str | None,
) -> GroupPage:
    """Return a page of the table. Raises RunError.

    search: words that the task, an id or a failure must all contain. versions: of the policy that `update` trained.
    component: of the reward, where `sort` says so. having: a reason, cause or status that a step or an attempt of the
    group has.
    """
    where, values = ["1"], list[Any]()
    if split is not None:
        where.append("split = ?")
        values.append(split)
    if preset is not None:
        where.append(f"({_PRESETS[preset]})")
    for name, value in having.items():
        if value is not None:
            where.append(_HAVING[name])
            values.append(value)
    if update is not None:
        where.append("(trained_version IN (SELECT value FROM json_each(?)) OR groups.group_id GLOB ?)")
        values += [json.dumps(versions), f"e{update:06d}*"]
    for word in search.split():
        where.append(_WORD)
        values += [json.dumps(word)[1:-1], *[word] * 4]
    condition = " AND ".join(where)
    by, joined, of_join = _COLUMNS.get(sort, "a.figure"), "", list[str]()
    if sort in _SUMS:
        figures = f"SELECT group_id, {_SUMS[sort]} AS figure FROM trajectories GROUP BY group_id"
        joined, of_join = f"JOIN ({figures}) a USING (group_id)", [component] * figures.count("?")
    way = "DESC" if descending else "ASC"
    total = ledger.query(f"SELECT count(*) AS total FROM groups WHERE {condition}", *values)[0]["total"]
    rest = f"{joined} WHERE {condition} ORDER BY {by} {way} NULLS LAST, groups.rowid {way}"
    rows = ledger.rows("groups", f"{rest} LIMIT ? OFFSET ?", *of_join, *values, limit, offset)
    if around is None:
        return GroupPage(total, rows)
    names = [row["group_id"] for row in ledger.query(f"SELECT groups.group_id FROM groups {rest}", *of_join, *values)]
    at = names.index(around) if around in names else len(names)
    previous = names[at - 1] if 0 < at < len(names) else None
    return GroupPage(total, rows, previous, names[at + 1] if at + 1 < len(names) else None)
