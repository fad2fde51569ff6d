"""When attempts called the engine: those of an update one by one, and those of a run as figures over time."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated

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
    began, waited, seconds, attempts = calls
    logged = run.intervals()[1].rows
    first = min((row["started"] for row in logged), default=np.inf)
    last = max((row["started"] + row["seconds"] for row in logged), default=-np.inf)
    result.is_recorded = bool(((began >= first) & (began <= last)).any())
    if not result.is_recorded:
        return result
    ends, sampled = began + seconds, began + waited
    firsts, lasts = _extents(began, ends, attempts)
    for start, end, parts in spans:
        edges = np.linspace(start, end, parts + 1)
        sampling, waiting = _at_once(sampled, ends, edges), _at_once(began, sampled, edges)
        outside = np.maximum(_at_once(firsts, lasts, edges) - sampling - waiting, 0.0)
        for name, values in (("sampling", sampling), ("waiting", waiting), ("outside", outside)):
            getattr(result, name).append([round(value, 3) for value in values.tolist()])
        result.busy += _covered(np.clip(sampled, start, end), np.clip(ends, start, end))
    result.busy /= sum(end - start for start, end, _ in spans) or 1.0
    moments = np.concatenate([firsts, lasts])
    changes = np.repeat([1, -1], len(firsts))[np.lexsort((np.arange(len(moments)), moments))]
    result.most = int(changes.cumsum().max())
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


_Times = tuple[Floats, Floats, Floats, NDArray[np.int64]]
_NO_TIMES: _Times = (np.empty(0), np.empty(0), np.empty(0), np.empty(0, np.int64))


def _train_calls(run: RecordedRun) -> tuple[_Times, list[str]]:
    """Return when each call of training began, how long it waited and took, and the number of its attempt; problems."""
    times, attempts, problems = [_NO_TIMES], 0, []
    for shard in run.ledger.training_shards():
        try:
            file = run.ledger.shard(shard)
            make = partial(_shard_times, run.directory.rollouts, file)
            began, waited, seconds, numbers = run.kept(f"calls {shard}", file, make)
        except TreadleError as error:
            problems.append(str(error))
            continue
        times.append((began, waited, seconds, numbers + attempts))
        attempts += int(numbers.max(initial=-1)) + 1
    began, waited, seconds, numbers = (np.concatenate(column) for column in zip(*times, strict=True))
    return (began, waited, seconds, numbers), problems


def _shard_times(directory: Path, shard: WrittenFile) -> _Times:
    """Return the times of a shard's calls, without the rest of it: a run may have made millions."""
    timed = [call for call in read_call_times(directory, shard) if call["started"] is not None]
    _, numbers = np.unique([call["trajectory_id"] for call in timed], return_inverse=True)
    began, waited, seconds = (
        np.array([call[name] or 0.0 for call in timed], np.float64) for name in ("started", "waited", "seconds")
    )
    return began, waited, seconds, numbers.astype(np.int64)


def _extents(began: Floats, ends: Floats, attempts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return when each attempt's first call began, and when its last one ended."""
    count = int(attempts.max()) + 1
    firsts, lasts = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(firsts, attempts, began)
    np.maximum.at(lasts, attempts, ends)
    return firsts, lasts


def _at_once(starts: Floats, ends: Floats, edges: Floats) -> Floats:
    """Return how many of the intervals there are at once, as the mean between each two edges."""
    passed = _since(starts, edges) - _since(ends, edges)
    width = np.diff(edges)
    return np.diff(passed) / np.where(width > 0, width, 1.0)


def _since(moments: Floats, edges: Floats) -> Floats:
    """Return the sum over the moments of the seconds from each to an edge, of those before it."""
    moments = np.sort(moments)
    before = np.searchsorted(moments, edges)
    sums = np.concatenate([[0.0], np.cumsum(moments - edges[0])])
    return np.asarray(before * (edges - edges[0]) - sums[before])


def _covered(starts: Floats, ends: Floats) -> float:
    """Return the seconds that at least one of the intervals covers."""
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate([starts[:1], ends[:-1]])
    return float(np.maximum(ends - np.maximum(starts, before), 0.0).sum())
