"""Pages about a whole run: settings, state, counts, metrics, and the cost of packing and breaks."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import Query
from fastapi.exceptions import RequestValidationError
from numpy.typing import NDArray

from treadle.core.config import as_override, describe
from treadle.core.errors import RunError, TreadleError
from treadle.record.checkpoint_retention import checkpoint_update
from treadle.record.run_directory import JsonLog
from treadle.report.metrics import DECLARED
from treadle.report.report import count_tokens
from treadle.view.groups import explain
from treadle.view.recorded_run import Number, RecordedRun, Run
from treadle.view.texts import Json, clipped

_MAX_FAILURES = 20


def view_run(run: Run) -> Json:
    """Return the run's summary, settings and checkpoints.

    metrics: name -> unit, help and view of each declared metric. no_update: why there is nothing to plot.
    """
    page: Json = {
        **run.summary(),
        "settings": [],
        "checkpoints": [],
        "metrics": {m.name: {"unit": m.unit, "help": m.help, "view": m.view} for m in DECLARED},
        "no_update": _no_update(run),
    }
    with suppress(TreadleError):  # one of the summary's problems
        page["settings"] = [
            {"path": f.path, "value": as_override(f.value), "is_default": f.is_default, "help": f.help}
            for f in describe(run.config())
        ]
    with suppress(RunError):  # as above
        names = run.ledger.checkpoint_names()
        page["checkpoints"] = [name for name in names if (run.directory.checkpoints / name).is_dir()]
    return page


def _no_update(run: RecordedRun) -> str:
    if run.rows("update"):
        return ""
    if lines := run.metrics().unreadable:
        return f"No line of metrics.jsonl that names an update can be read; damaged lines: {len(lines)}."
    with suppress(RunError):  # one of the summary's problems
        done = max(map(checkpoint_update, map(Path, run.ledger.checkpoint_names())), default=0)
        if done:
            return f"metrics.jsonl names no update, but there is a checkpoint of update {done}: restore the file."
    if run.state() == "recorded":
        return "Recorded trajectories, which are not trained."
    if run.state() == "in progress":
        return "No update yet; this page fills with the first one."
    return f"The run {'ended' if run.state() == 'finished' else 'was stopped'} before its first update."


def view_counts(run: Run) -> Json:
    """Return counts over the whole ledger, which takes a second for a large run: splits, states, failures."""
    if not run.ledger.path.is_file():
        return {"splits": [], "states": [], "failures": []}

    def count() -> Json:
        failures = run.ledger.failures(_MAX_FAILURES)
        states = run.ledger.step_states()
        return {
            "splits": run.ledger.splits(),
            "states": [{**row, "text": explain(row["state"], row["reason"]).text} for row in states],
            "failures": [{**row, "message": clipped(row["message"]), "traceback": None} for row in failures],
        }

    return run.kept("counts", run.ledger.signature(), count)


def view_metrics(run: Run, generation: str = "", after: Number = 0) -> Json:
    """Return the rows of metrics.jsonl that a page does not have yet, from `start` on.

    generation, after: generation and number of the page's rows; another generation means that the file was rewritten.
    """
    return _rows_after(*run.log(run.directory.metrics_file), generation, after)


def view_intervals(run: Run, generation: str = "", after: Number = 0) -> Json:
    return _rows_after(*run.log(run.directory.intervals_file), generation, after)


def _rows_after(name: str, log: JsonLog, generation: str, after: int) -> Json:
    start = min(after, len(log.rows)) if generation == name else 0
    return {"generation": name, "start": start, "rows": log.rows[start:]}


def view_breaks(run: Run) -> Json:
    """Return the run's tokens as counted by `treadle report`: packing, relations, and unreadable shards.

    updates: per update, the tokens that training computes under each packing, and the tokens recomputed for breaks.
    """

    def count() -> Json:
        texts, problem = run.shown_texts()
        counts = count_tokens(run, None if problem else texts.decode, problem)
        updates = [{"update": run.update_of(row["version"]), **row} for row in counts.pop("by_version")]
        return {**counts, "updates": [row for row in updates if row["update"] is not None]}

    return run.kept("breaks", run.signature(), count)


def calls_of_update(run: Run, update: Number) -> Json:
    """Return the times of calls of the attempts that an update trained. Raises RunError.

    attempts, rewards: in order of their first calls. calls: (index of the attempt, step, seconds since the first of
    all, seconds of those waited or None, seconds). unknown: number of calls without a recorded time.
    """
    calls, problems = list[Json](), list[str]()
    rows = run.ledger.trained_by(run.versions_of(update))
    rewards = {row["trajectory_id"]: row["reward"] for row in rows}
    for shard in dict.fromkeys(row["shard"] for row in rows):
        try:
            calls += [call for call in run.call_times(shard) if call["trajectory_id"] in rewards]
        except TreadleError as error:
            problems.append(str(error))
    timed = sorted((call for call in calls if call["started"] is not None), key=lambda call: call["started"])
    place: dict[str, int] = {}
    for call in timed:
        place.setdefault(call["trajectory_id"], len(place))
    return {
        "attempts": list(place),
        "rewards": [rewards[name] for name in place],
        "calls": [
            (place[c["trajectory_id"]], c["step"], c["started"] - timed[0]["started"], c["waited"], c["seconds"])
            for c in timed
        ],
        "unknown": len(calls) - len(timed),
        "problems": problems,
    }


Floats = NDArray[np.float64]


def activity(run: Run, span: Annotated[list[str], Query(max_length=200)]) -> Json:
    """Return the mean number of training attempts in each phase, over equal parts of some time spans.

    span: `start,end,parts` of each, in seconds since 1970. sampling: calls being sampled. waiting: calls waiting for
    the engine. outside: attempts between two calls, in the environment or agent. most: maximum number in progress over
    the whole run. busy: share of the spans with a call being sampled. is_recorded: whether the run records when calls
    began. Raises RunError.
    """
    spans = [_parsed(text) for text in span]
    (began, sampled, ended, firsts, lasts), problems = run.kept(
        "activity", run.ledger.signature(), lambda: _train_calls(run)
    )
    logged = run.log(run.directory.intervals_file)[1].rows
    first = min((row["started"] for row in logged), default=np.inf)
    last = max((row["started"] + row["seconds"] for row in logged), default=-np.inf)
    result: Json = {name: [] for name in ("sampling", "waiting", "outside")} | {"most": 0, "busy": 0.0}
    result |= {"is_recorded": bool(((began >= first) & (began <= last)).any()), "problems": problems}
    if not result["is_recorded"]:
        return result
    sampling, waiting, playing = _at_once(sampled, ended), _at_once(began, sampled), _at_once(firsts, lasts)
    result["most"] = int(playing[1].max())
    for start, end, parts in spans:
        edges = np.linspace(start, end, parts + 1)
        means = [_means(*counts, edges) for counts in (sampling, waiting, playing)]
        outside = np.maximum(means[2] - means[1] - means[0], 0.0)
        for name, values in (("sampling", means[0]), ("waiting", means[1]), ("outside", outside)):
            result[name].append([round(value, 3) for value in values.tolist()])
        result["busy"] += (end - start) * float(_means(sampling[0], sampling[1] > 0, np.array([start, end]))[0])
    result["busy"] /= sum(end - start for start, end, _ in spans) or 1.0
    return result


def _parsed(text: str) -> tuple[float, float, int]:
    """Parse `1700000000.5,1700000060,100` into (start, end, parts). Raises RequestValidationError."""
    try:
        start, end, parts = (float(number) for number in text.split(","))
        if -math.inf < start <= end < math.inf and 0 < parts <= 5000:
            return start, end, int(parts)
    except ValueError:
        pass
    problem = {"loc": ("query", "span"), "msg": f"{text!r} is not start,end,parts", "type": "value_error"}
    raise RequestValidationError([problem])


def _train_calls(run: RecordedRun) -> tuple[tuple[Floats, ...], list[str]]:
    times, problems = [(np.empty(0),) * 5], []
    for shard in run.ledger.training_shards():
        try:
            file = run.ledger.shard(shard)
            times.append(run.kept(f"calls {shard}", file, partial(_shard_times, run, shard)))
        except TreadleError as error:
            problems.append(str(error))
    return tuple(np.concatenate(column) for column in zip(*times, strict=True)), problems


def _shard_times(run: RecordedRun, shard: str) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return when each call began, was sampled and ended, and each attempt's first start and last end."""
    timed = [call for call in run.call_times(shard) if call["started"] is not None]
    began, waited, seconds = (
        np.array([call[name] or 0.0 for call in timed], np.float64) for name in ("started", "waited", "seconds")
    )
    names, attempt = np.unique([call["trajectory_id"] for call in timed], return_inverse=True)
    firsts, lasts = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(firsts, attempt, began)
    np.maximum.at(lasts, attempt, began + seconds)
    return began, began + waited, began + seconds, firsts, lasts


def _at_once(starts: Floats, ends: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Return the times at which intervals begin or end, in order, and the number of open intervals from each on."""
    moments = np.concatenate([starts, ends])
    order = np.argsort(moments, kind="stable")
    return moments[order], np.repeat([1, -1], len(starts))[order].cumsum()


def _means(moments: Floats, values: NDArray[Any], edges: Floats) -> Floats:
    """Return means between consecutive edges of a step function with these values from these times on, 0 outside."""
    passed = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(moments))])
    width = np.diff(edges)
    return np.asarray(np.diff(np.interp(edges, moments, passed)) / np.where(width > 0, width, 1.0))
