"""One trajectory and one group: tokens, relations of steps, the prefix tree, and the outcome of each step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Query

from treadle.core.errors import DamageError, RunError, TreadleError
from treadle.core.images import OWN
from treadle.core.text import escape_text
from treadle.core.trainer import StepTrace
from treadle.core.types import Ids, Step, StepState, common_prefix, role_of
from treadle.packing.flat import PackedCall
from treadle.record.describe import packed_calls, shown_steps, step_relations
from treadle.record.group_search import Split
from treadle.rendering.texts import MessageTexts, Span, TokenTexts, extended_spans, message_spans
from treadle.report.report import PackingCount
from treadle.view.groups import Attempt, GroupRow, fate, group_rows, groups_of_task
from treadle.view.recorded_run import Key, Number, RecordedRun, Run
from treadle.view.texts import OF_TRACES, Json, clipped, columns_of, prefix_segments

_SNIPPET = 60  # characters on either side of a match
_MAX_FOUND = 200
_MAX_DRAWN = 24  # maximum number of attempts side by side
_COMPUTED = (StepState.TRAINED, StepState.RECORDED)  # states of steps that are or may still be in an update


def view_trajectory(run: Run, trajectory_id: Key) -> Json:
    """Return a trajectory; if its tokens are unreadable, the rest of it and the reason (`problem`). Raises RunError."""
    row = _row(run, "trajectories", "trajectory_id", trajectory_id)
    group_row = _row(run, "groups", "group_id", row["group_id"])
    [group] = group_rows(run, [group_row])
    names = [a.trajectory_id for a in group.attempts]
    view: Json = {
        "run": run.key,
        "attempt": group.attempts[names.index(trajectory_id)],
        "group": group,
        "split": group.split,
        "ground_truth": json.loads(group_row["task"]).get("ground_truth"),
        "traceback": escape_text(row["failure_traceback"]) if row["failure_traceback"] else None,
        "metrics": {name: e["value"] for name, e in json.loads(row["metrics"]).items()},  # {"tool_calls": 2.0}
        "siblings": names,
        **run.ledger.trajectory_neighbors(trajectory_id, row["group_id"]),
        **{
            "steps": [],
            "columns": [],
            "segments": [],
            "texts": {},
            "special": [],
            "pictures": {},
            "cost": None,
            "compactions": [],
        },
    }
    try:
        rows, steps = run.ledger.steps(trajectory_id), run.steps(row["shard"], trajectory_id)
        if len(steps) != len(rows):
            raise DamageError(
                f"the ledger has {len(rows)} steps of {trajectory_id}, its shard {row['shard']} {len(steps)}"
            )
    except TreadleError as error:
        return {**view, "problem": str(error)}
    return view | _tokens(run, group, steps, rows, row)


def _row(run: RecordedRun, table: str, key: str, name: str) -> dict[str, Any]:
    rows = run.ledger.query(f"SELECT * FROM {table} WHERE {key} = ?", name)
    if not rows:
        raise RunError(f"no {key.removesuffix('_id')} {name!r} in {run.path}")
    return rows[0]


def _texts(run: RecordedRun, steps: Iterable[Step]) -> tuple[TokenTexts, str | None]:
    """Return texts for some steps' tokens or messages, and the reason if ids are shown."""
    return (MessageTexts(), None) if any(step.is_text for step in steps) else run.shown_texts()


def _tokens(
    run: RecordedRun, group: GroupRow, steps: Sequence[Step], rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
) -> Json:
    """Return the token-level data. rows: the steps' rows of the ledger; row: the trajectory's."""
    texts, no_texts = _texts(run, steps)
    traces, no_traces = _traces(run, row["trajectory_id"], group.version if group.split == "train" else None)
    first_call = min((step.started for step in steps if step.started is not None), default=0.0)
    calls, (shown, compacted) = packed_calls(steps, texts), shown_steps(steps, texts, row["advantage"], traces)
    tree, ends = _tree(calls, texts)
    spans: list[list[Span]] = []
    views: list[Json] = []
    for number, (step, call, facts) in enumerate(zip(steps, calls, shown, strict=True)):
        ids, relation = call.token_ids.tolist(), facts["relation"]
        del facts["chat"], facts["state_key"]  # long, and any text
        base = spans[relation["base"]] if relation["base"] is not None else []
        spans.append(extended_spans(base, relation["shared"], ids, texts) if base else message_spans(ids, texts))
        views.append(
            {
                **facts,
                # The segment in which its tokens end; its ancestors have the earlier tokens.
                "segment": ends[number],
                "prompt_tokens": call.prompt_length,
                "completion_tokens": len(ids) - call.prompt_length,
                # A text-only call has pieces in place of tokens here: report the tokens counted by its server.
                "counted": {"read": step.prompt_tokens, "written": step.completion_tokens} if step.is_text else None,
                "relation": _relation(relation),
                "fate": fate(rows[number], row, group.update, step),
                "spans": spans[-1],
                # seconds from the attempt's first call to this one
                "began": None if step.started is None else step.started - first_call,
                "calls": [_call(each) for each in facts["calls"]],
                "has_experts": step.routing is not None,
            }
        )
    columns = columns_of((name for view in views for name in view["columns"]), group.split)
    trained = [call for call, step in zip(calls, rows, strict=True) if step["state"] in _COMPUTED]
    cost = _cost(run, [("", trained)]) if group.split == "train" and trained else None
    problem = "; ".join(filter(None, (no_texts, no_traces))) or None
    page = {**tree, "steps": views, "columns": columns, "cost": cost, "compactions": compacted}
    return {**page, "not_kept": _not_kept(run, columns, bool(traces)), "problem": problem}


def _call(call: Json) -> Json:
    of_call = {name: call[name] for name in ("model", "prompt_tokens", "completion_tokens", "seconds")}
    return {**of_call, "reply": clipped(call["reply"]["content"])}


def _traces(run: RecordedRun, trajectory_id: str, version: int | None) -> tuple[list[StepTrace], str | None]:
    """Return the traces of a trajectory in order of updates, and why they are unreadable, if so."""
    try:
        return run.traces(trajectory_id, version), None
    except TreadleError as error:
        return [], str(error)


def _tree(calls: Sequence[PackedCall], texts: TokenTexts) -> tuple[Json, list[int]]:
    """Return the prefix tree of some calls, with the text of each token id, and the segment in which each call ends.

    pictures: id of an image's first placeholder -> its data URL.
    """
    segments, ends = prefix_segments(calls)
    for segment in segments:
        segment.joined = texts.joined(segment.ids)
    shown = texts.all(ident for segment in segments for ident in segment.ids)
    pictures = {
        ident: image.url for ident in shown if ident >= OWN for image, n in [texts.images.image(ident)] if not n
    }
    tree = {"segments": segments, "texts": shown, "special": sorted(shown.keys() & texts.special)}
    return {**tree, "pictures": pictures}, ends


def _relation(relation: Json) -> Json:
    return relation | {side: relation[side] and escape_text(relation[side]["text"]) for side in ("was", "now")}


def _not_kept(run: RecordedRun, columns: list[Json], is_traced: bool) -> str:
    """Describe missing learner values: "ratio, entropy: kept for 3% of groups (...)"; "" if there are none."""
    labels = ", ".join(each["label"] for each in columns if each["name"] in OF_TRACES and not each["is_recorded"])
    if not labels or is_traced:
        return labels and f"{labels}: the loss has none"
    try:
        share = run.config().orchestration.traced_groups
    except TreadleError:
        # A file of trajectories, or damaged.
        return ""
    return f"{labels}: kept for {100 * share:g}% of groups (orchestration.traced_groups)"


def _cost(run: RecordedRun, attempts: Sequence[tuple[str, Sequence[PackedCall]]]) -> Json:
    """Count the training tokens of some attempts' steps under each packing; `tree` within a role.

    attempts: role and calls of each.
    """
    count = PackingCount()
    for role in dict.fromkeys(role for role, _ in attempts):
        count.add_group([call for own, calls in attempts if own == role for call in count.add_trajectory(calls)])
    try:
        used = str(run.config().training.packing)
    except TreadleError:
        used = ""
    return {"step": count.step, "chain": count.chain, "tree": count.group_tree, "used": used}


def view_group(run: Run, group_id: Key) -> Json:
    row = _row(run, "groups", "group_id", group_id)
    [group] = group_rows(run, [row])
    attempts, trained = _attempts(run, group.attempts)
    computed = [(role_of(a.trajectory_id), c) for a, c in zip(group.attempts, trained, strict=True) if c]
    return {
        "run": run.key,
        "group": group,
        "ground_truth": json.loads(row["task"]).get("ground_truth"),
        **run.ledger.neighbors(group_id),
        **attempts,
        "cost": _cost(run, computed) if group.split == "train" and computed else None,
    }


def follow_task(run: Run, task_id: Annotated[str, Query(max_length=1000)], split: Split = "held_out") -> Json:
    """Return all groups of a task, oldest first, and the tree of attempts of each. Raises RunError if there is none."""
    groups = groups_of_task(run, task_id, split)
    attempts = [(attempt.attempt, -n, attempt) for n, group in enumerate(groups) for attempt in group.attempts]
    drawn = sorted(attempts, key=lambda one: one[:2])[:_MAX_DRAWN]
    tree, _ = _attempts(run, [attempt for *_, attempt in sorted(drawn, key=lambda one: (-one[1], one[0]))])
    if len(drawn) < len(attempts):
        note = f"{len(drawn)} of {len(attempts)} attempts are side by side: first ones, newest first"
        tree["problems"].insert(0, note)
    return {"task_id": task_id, "question": groups[0].question, "groups": groups, **tree}


def _attempts(run: RecordedRun, attempts: Sequence[Attempt]) -> tuple[Json, list[list[PackedCall]]]:
    """Return the tree of all steps with readable tokens, and each attempt's training calls.

    apart: trajectory -> position in its last step's sequence where it first differs from the first attempt.
    """
    problems, views, played = list[str](), list[Json](), list[list[Step]]()
    trained: list[list[PackedCall]] = []
    calls: list[PackedCall] = []
    whole: dict[str, Ids] = {}
    for attempt in attempts:
        try:
            played.append(run.trajectory(attempt.trajectory_id)[1])
        except TreadleError as error:
            problems += [str(error)] if str(error) not in problems else []
            played.append([])
    texts, no_texts = _texts(run, itertools.chain(*played))
    problems[:0] = [no_texts] if no_texts else []
    for number, (attempt, steps) in enumerate(zip(attempts, played, strict=True)):
        outcomes = {row["step"]: (row["state"], row["reason"]) for row in run.ledger.steps(attempt.trajectory_id)}
        own, related = packed_calls(steps, texts, number), step_relations(steps, texts)
        calls += own
        trained.append([])
        for at, (call, relation) in enumerate(zip(own, related, strict=True)):
            state, reason = outcomes.get(at, (StepState.RECORDED, None))
            if state in _COMPUTED:
                trained[-1].append(call)
            names = {"trajectory_id": attempt.trajectory_id, "step": at, "prompt_tokens": call.prompt_length}
            views.append({**names, "relation": _relation(asdict(relation)), "state": state, "reason": reason})
        if own:
            whole[attempt.trajectory_id] = own[-1].token_ids
    tree, ends = _tree(calls, texts)
    steps_in_tree = [{**view, "segment": end} for view, end in zip(views, ends, strict=True)]
    apart = {name: common_prefix(next(iter(whole.values())), ids) for name, ids in whole.items()}
    return {**tree, "steps": steps_in_tree, "apart": apart, "problems": problems}, trained


def search_update(run: Run, update: Number, text: Annotated[str, Query(min_length=1, max_length=200)]) -> Json:
    """Search an update's trajectories for a text, sampled or newly read by a step. Raises RunError.

    found: trajectory, step, the match and the text around it. is_complete: False if there are more matches.
    """
    rows = run.ledger.trained_by(run.versions_of(update), f"e{update:06d}")
    texts, problem = run.shown_texts()
    places: list[Json] = []
    result: Json = {"found": places, "searched": 0, "is_complete": True, "problems": [problem] if problem else []}
    for shard, members in itertools.groupby(rows, lambda row: row["shard"]):
        try:
            steps = run.shard(shard)
        except TreadleError as error:
            result["problems"].append(str(error))
            steps = {}
        for row in members:
            result["searched"] += 1
            places += _places(row["trajectory_id"], steps.get(row["trajectory_id"], []), text, texts)
            if len(places) > _MAX_FOUND:
                return {**result, "found": places[:_MAX_FOUND], "is_complete": False}
    return result


def _places(trajectory: str, steps: Sequence[Step], text: str, texts: TokenTexts) -> Iterator[Json]:
    before = None
    for number, step in enumerate(steps):
        ids, _ = texts.call(step)
        decoded = texts.decode(ids[common_prefix(before, ids) if before is not None else 0 :])
        before = ids
        start = decoded.lower().find(text.lower())
        if start >= 0:
            end = start + len(text)
            parts = (decoded[max(start - _SNIPPET, 0) : start], decoded[start:end], decoded[end : end + _SNIPPET])
            sides = dict(zip(("before", "match", "after"), map(escape_text, parts), strict=True))
            yield {"trajectory_id": trajectory, "step": number, **sides}


def experts_of(run: Run, trajectory_id: Key, step: Number, token: Number) -> Json:
    """Return the experts chosen for one sampled token, by layer: [M][k]. Raises RunError if none are recorded."""
    steps = run.trajectory(trajectory_id)[1]
    routing = steps[step].routing if step < len(steps) else None
    if routing is None or token >= len(routing):
        raise RunError(f"no experts are recorded for token {token} of step {step} of {trajectory_id!r}")
    return {"layers": routing[token].tolist()}
