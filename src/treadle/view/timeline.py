"""When attempts called the engine: those of an update one by one, and those of a run as figures over time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.core.errors import TreadleError
from treadle.core.files import WrittenFile
from treadle.orchestration.store.rollout_store import read_call_times
from treadle.view.models import Activity, Calls
from treadle.view.recorded_run import RecordedRun


def calls_of_update(run: RecordedRun, update: int) -> Calls:
    """Return when the calls of the attempts that an update trained were made. Raises RunError."""
    rows = run.ledger.trained_by(run.versions_of(update))
    result = Calls()
    rewards = {row["trajectory_id"]: row["reward"] for row in rows}
    calls: list[dict[str, Any]] = []
    for shard in dict.fromkeys(row["shard"] for row in rows):
        try:
            times = read_call_times(run.directory.rollouts, run.ledger.shard(shard))
            calls += [call for call in times if call["trajectory_id"] in rewards]
        except TreadleError as error:
            result.problems.append(str(error))
    timed = sorted((call for call in calls if call["started"] is not None), key=lambda call: call["started"])
    result.unknown = len(calls) - len(timed)
    result.attempts = list(dict.fromkeys(call["trajectory_id"] for call in timed))
    result.rewards = [rewards[name] for name in result.attempts]
    place = {name: at for at, name in enumerate(result.attempts)}
    for call in timed:
        began = call["started"] - timed[0]["started"]
        result.calls.append((place[call["trajectory_id"]], call["step"], began, call["waited"], call["seconds"]))
    return result


Floats = NDArray[np.float64]


def activity(run: RecordedRun, spans: Sequence[tuple[float, float, int]]) -> Activity:
    """Return what attempts of training did over time. Raises RunError.

    spans: (start, end, parts) of each, in seconds since 1970.
    """
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


_Times = tuple[Floats, Floats, Floats, NDArray[np.int64]]
_NO_TIMES: _Times = (np.empty(0), np.empty(0), np.empty(0), np.empty(0, np.int64))


def _train_calls(run: RecordedRun) -> tuple[_Times, list[str]]:
    """Return when each call of training began, how long it waited and took, and the number of its attempt; problems."""
    times, attempts = [_NO_TIMES], 0
    problems: list[str] = []
    for shard in run.ledger.training_shards():
        try:
            file = run.ledger.shard(shard)
            began, waited, seconds, numbers = run.kept(
                f"calls {shard}", file, partial(_shard_times, run.directory.rollouts, file)
            )
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
    names = {name: number for number, name in enumerate(dict.fromkeys(call["trajectory_id"] for call in timed))}
    began, waited, seconds = (
        np.array([call[name] or 0.0 for call in timed], np.float64) for name in ("started", "waited", "seconds")
    )
    return began, waited, seconds, np.array([names[call["trajectory_id"]] for call in timed], np.int64)


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
