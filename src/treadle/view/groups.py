"""The table of groups, with their attempts; and outcomes of steps in words (docs/runs.md has all reasons)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import Query
from pydantic import BaseModel

from treadle.core.errors import Cause, RunError
from treadle.core.outcomes import rejection
from treadle.core.text import escape_line
from treadle.core.types import PLAYERS, DropReason, Step, StepState
from treadle.record.group_search import GroupQuery, find_groups
from treadle.view.recorded_run import RecordedRun, Run
from treadle.view.texts import Json, clipped

_EVALUATION = re.compile(r"e(\d+)g?(?:r\d+)?-")  # r2: second repetition
_QUESTION = 240  # maximum length of a question in the table


class Attempt(BaseModel):
    """A row of a trajectory table. states: number of its steps by outcome, `{"dropped: stale": 2}`.

    start_source, start_steps: the recorded attempt in whose middle it began, if any, and the steps replayed from it.
    """

    trajectory_id: str
    attempt: int
    status: str
    reward: float | None
    trained_reward: float | None
    advantage: float | None
    components: dict[str, float]
    steps: int
    completion_tokens: int
    seconds: float
    failure_cause: str | None
    failure_message: str | None
    warning: str
    states: dict[str, int]
    start_source: str | None
    start_steps: int


class GroupRow(BaseModel):
    """A row of the groups' table. update: the one that trained it, or after which it was evaluated.

    when: that in words, or why there is none: `update 3`, `no update: stale`.
    """

    group_id: str
    split: str
    task_id: str
    question: str
    played_by: str
    update: int | None
    version: int | None
    when: str
    attempts: list[Attempt]


def list_groups(run: Run, query: Annotated[GroupQuery, Query()]) -> Json:
    page = find_groups(run.ledger, query, [] if query.update is None else run.versions_of(query.update))
    return {**page, "rows": group_rows(run, page["rows"])}


def group_rows(run: RecordedRun, rows: Sequence[Mapping[str, Any]]) -> list[GroupRow]:
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
    """Return why a training group is in no update. version: policy version that trained it. state: the run's state."""
    if version is not None:
        return f"an update of version {version} that metrics.jsonl does not name"
    ends = dict.fromkeys(end for attempt in attempts for end in attempt.states)
    if state == "recorded":
        return "no update: recorded, not trained"
    if StepState.RECORDED in ends:
        return "no update yet" if state == "in progress" else "no update: the run stopped before it"
    reasons = [end.partition(": ")[2] for end in ends]
    return f"no update: {', '.join(filter(None, reasons)) or 'no step'}"


def _question(task: Mapping[str, Any]) -> str:
    asked = [m.get("content") for m in task.get("prompt") or () if isinstance(m, dict) and m.get("role") == "user"]
    text = str(asked[-1]) if asked else json.dumps(task.get("extras") or {}, ensure_ascii=False)
    text = escape_line(" ".join(text[: 4 * _QUESTION].split()))
    return text if len(text) <= _QUESTION else f"{text[:_QUESTION]} …"


def groups_of_task(run: RecordedRun, task_id: str, split: str) -> list[GroupRow]:
    rows = run.ledger.groups_of_task(task_id, split)
    if not rows:
        raise RunError(f"no {split} task {task_id!r} in {run.path}")
    return group_rows(run, rows)


_REASON = 200  # characters


class Explanation(NamedTuple):
    """A sentence about an outcome, and the settings that decide it."""

    text: str
    settings: tuple[str, ...] = ()


def _dropped(why: str, *settings: str) -> Explanation:
    return Explanation(f"Not trained: {why}", settings)


REASONS: Mapping[DropReason, Explanation] = {
    DropReason.FAILED: _dropped(
        "its attempt, or too many of its group, ended without a reward, which is not 0.", "training.min_group_size"
    ),
    DropReason.RESAMPLED: _dropped(
        "the run stopped before a checkpoint held it, and sampled its batch again.", "orchestration.checkpoint_every"
    ),
    DropReason.REFUSED: _dropped(
        "the learner's model cannot take its trajectory.", "rollout.max_input_tokens", "rollout.max_completion_tokens"
    ),
    DropReason.CANCELLED: _dropped(
        "its caller did not wait for the answer, which never reached the agent.", "rollout.agent_timeout"
    ),
    DropReason.REPLAYED: _dropped(
        "another attempt sampled it; this one began after it, and its tokens are context.", "rollout.starts"
    ),
    DropReason.REJECTED: _dropped("its answer was discarded; later steps do not build on it."),
    DropReason.DIVERGED: _dropped(
        "its attempt could not begin in the middle, where most of its group did.", "rollout.starts"
    ),
    DropReason.MASKED: _dropped("it is a summary, and `rollout.compaction.trained` is false.", "rollout.compaction"),
    DropReason.STALE: _dropped(
        "its policy was too old by its update.", "orchestration.max_staleness", "orchestration.stale_policy"
    ),
    DropReason.FILTERED: _dropped(
        "all advantages of its group are 0; dynamic sampling leaves it out.", "algorithm.dynamic_sampling"
    ),
    DropReason.ROLLED_BACK: _dropped(
        "its policy was lost when the run went back to a checkpoint.", "orchestration.checkpoint_every"
    ),
    DropReason.OVERLONG: _dropped(
        "its trajectory was cut off at a limit, or too few of its group were not.",
        *("rewards.overlong", "rollout.max_completion_tokens", "rollout.max_steps"),
    ),
    DropReason.DAMAGED: _dropped("its tokens were found damaged on disk when the run was resumed."),
    DropReason.UNUSED: _dropped("it still waited for an update when the run was finished.", "orchestration.updates"),
}
_STATES: Mapping[StepState, Explanation] = {
    StepState.TRAINED: Explanation("Trained."),
    StepState.EVALUATED: Explanation("Played in an evaluation, which trains nothing.", ("evaluation.every",)),
    StepState.RECORDED: Explanation(
        "Recorded and durable; no checkpoint holds it.", ("orchestration.checkpoint_every",)
    ),
}
_LIMITS: Mapping[Cause, tuple[str, ...]] = {
    Cause.TIMEOUT: ("rollout.trajectory_timeout", "rollout.agent_timeout", "rollout.environment_timeout"),
    Cause.CONTEXT: ("rollout.max_input_tokens",),
}


def failure_settings(cause: str, message: str) -> tuple[str, ...]:
    """Return the settings that decide about such a failure; of several limits, those named in the message."""
    if cause not in list(Cause):
        return ()
    limits = _LIMITS.get(Cause(cause), ())
    named = tuple(path for path in limits if path in message)
    return (*(named or limits), "failures.causes")


def explain(state: str, reason: str | None) -> Explanation:
    """Explain a state of the ledger; unknown ones by their name only."""
    try:
        return REASONS[DropReason(reason)] if reason is not None else _STATES[StepState(state)]
    except (ValueError, KeyError):
        return Explanation(f"{state}: {reason}" if reason else state)


def fate(row: Mapping[str, Any], trajectory: Mapping[str, Any], update: int | None, step: Step) -> Json:
    """Explain a step's outcome. row, trajectory: its and its trajectory's row of the ledger."""
    text, settings = explain(row["state"], row["reason"])
    if row["state"] == StepState.TRAINED:
        text = _trained(row, trajectory, update, int(step.mask.sum()))
    elif why := rejection(step):
        text = f"Rejected: {why}. Later steps do not build on it, and it is not trained."
    elif row["state"] == StepState.RECORDED and update is not None:
        text = (
            f"In the batch of update {update}, not in a checkpoint yet: a run resumed from an earlier one repeats it."
        )
    elif row["reason"] == DropReason.FAILED and trajectory["failure_cause"]:
        message = trajectory["failure_message"] or ""
        # The trajectory's page shows it in full.
        why = clipped(message, _REASON)
        text = f"Not trained: its attempt has no reward: {trajectory['failure_cause']}: {why}"
        settings = failure_settings(trajectory["failure_cause"], message)
    elif row["reason"] == DropReason.REFUSED and trajectory["warning"]:
        text = f"Not trained: the learner's model cannot take its trajectory: {clipped(trajectory['warning'])}"
    return {"state": row["state"], "reason": row["reason"], "text": text, "settings": settings}


def _trained(step: Mapping[str, Any], trajectory: Mapping[str, Any], update: int | None, trainable: int) -> str:
    where = "" if update is None else f" in update {update}"
    text = f"Trained{where}: {trainable} of its {step['completion_tokens']} sampled tokens are in the loss"
    advantage = trajectory["advantage"]
    if advantage is None:
        return f"{text}."
    if advantage == 0:
        return f"{text}, but with advantage 0 they have no effect."
    return f"{text}, made {'more' if advantage > 0 else 'less'} likely by an advantage of {advantage:+.3g}."
