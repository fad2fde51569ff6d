"""When attempts called the engine: those of an update one by one, and those of a run as figures over time."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import Query
from fastapi.exceptions import RequestValidationError
from numpy.typing import NDArray

from treadle.core.errors import TreadleError
from treadle.core.files import WrittenFile
from treadle.orchestration.store.rollout_store import read_call_times
from treadle.view.models import Activity, Json
from treadle.view.recorded_run import Number, RecordedRun, Run


def calls_of_update(run: Run, update: Number) -> Json:
    """Return when the calls of the attempts that an update trained were made. Raises RunError.

    attempts, rewards: in the order of their first calls. calls: (index of the attempt, step, seconds since the first of
    all, seconds of those waited or None, seconds). unknown: number of calls without a recorded time.
    """
    calls, problems = list[Json](), list[str]()
    rows = run.ledger.trained_by(run.versions_of(update))
    rewards = {row["trajectory_id"]: row["reward"] for row in rows}
    for shard in dict.fromkeys(row["shard"] for row in rows):
        try:
            times = read_call_times(run.directory.rollouts, run.ledger.shard(shard))
            calls += [call for call in times if call["trajectory_id"] in rewards]
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


def activity(run: Run, span: Annotated[list[str], Query(max_length=200)]) -> Activity:
    """Return what attempts of training did over time. Raises RunError.

    span: `start,end,parts` of each, in seconds since 1970.
    """
    spans = [_parsed(text) for text in span]
    result = Activity()
    calls, result.problems = run.kept("activity", run.ledger.signature(), lambda: _train_calls(run))
    began, sampled, ended, firsts, lasts = calls
    logged = run.intervals()[1].rows
    first = min((row["started"] for row in logged), default=np.inf)
    last = max((row["started"] + row["seconds"] for row in logged), default=-np.inf)
    result.is_recorded = bool(((began >= first) & (began <= last)).any())
    if not result.is_recorded:
        return result
    sampling, waiting, playing = _at_once(sampled, ended), _at_once(began, sampled), _at_once(firsts, lasts)
    result.most = int(playing[1].max())
    for start, end, parts in spans:
        edges = np.linspace(start, end, parts + 1)
        means = [_means(*counts, edges) for counts in (sampling, waiting, playing)]
        outside = np.maximum(means[2] - means[1] - means[0], 0.0)
        for name, values in (("sampling", means[0]), ("waiting", means[1]), ("outside", outside)):
            getattr(result, name).append([round(value, 3) for value in values.tolist()])
        result.busy += (end - start) * float(_means(sampling[0], sampling[1] > 0, np.array([start, end]))[0])
    result.busy /= sum(end - start for start, end, _ in spans) or 1.0
    return result


def _parsed(text: str) -> tuple[float, float, int]:
    """Return the (start, end, parts) of `1700000000.5,1700000060,100`. Raises RequestValidationError."""
    try:
        start, end, parts = (float(number) for number in text.split(","))
        if -math.inf < start <= end < math.inf and 0 < parts <= 5000:
            return start, end, int(parts)
    except ValueError:
        pass
    problem = {"loc": ("query", "span"), "msg": f"{text!r} is not start,end,parts", "type": "value_error"}
    raise RequestValidationError([problem])


def _train_calls(run: RecordedRun) -> tuple[tuple[Floats, ...], list[str]]:
    """Return the times of training's calls, as `_shard_times` does for a shard; and problems."""
    times, problems = [(np.empty(0),) * 5], []
    for shard in run.ledger.training_shards():
        try:
            file = run.ledger.shard(shard)
            times.append(run.kept(f"calls {shard}", file, partial(_shard_times, run.directory.rollouts, file)))
        except TreadleError as error:
            problems.append(str(error))
    return tuple(np.concatenate(column) for column in zip(*times, strict=True)), problems


def _shard_times(directory: Path, shard: WrittenFile) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return when each call began, was sampled and ended; and of each attempt the first beginning and the last end.

    The rest of the shard is not kept: a run may have made millions of calls.
    """
    timed = [call for call in read_call_times(directory, shard) if call["started"] is not None]
    began, waited, seconds = (
        np.array([call[name] or 0.0 for call in timed], np.float64) for name in ("started", "waited", "seconds")
    )
    names, attempt = np.unique([call["trajectory_id"] for call in timed], return_inverse=True)
    firsts, lasts = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(firsts, attempt, began)
    np.maximum.at(lasts, attempt, began + seconds)
    return began, began + waited, began + seconds, firsts, lasts


def _at_once(starts: Floats, ends: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Return the moments at which intervals begin or end, in order, and how many there are from each on."""
    moments = np.concatenate([starts, ends])
    order = np.argsort(moments, kind="stable")
    return moments[order], np.repeat([1, -1], len(starts))[order].cumsum()


def _means(moments: Floats, values: NDArray[Any], edges: Floats) -> Floats:
    """Return the mean between each two edges of what has these values from these moments on, and is 0 outside."""
    passed = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(moments))])
    width = np.diff(edges)
    return np.asarray(np.diff(np.interp(edges, moments, passed)) / np.where(width > 0, width, 1.0))
