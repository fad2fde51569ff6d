"""The curves of runs, as plain data: what `treadle plot` and the picture at the end of a training show.

runs --group_runs--> groups that differ in the seed only --panels--> panels of curves --picture.draw--> PNG
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.core.config import as_override
from treadle.orchestration.config import RunConfig
from treadle.orchestration.reporting.metrics import COMPLETION_TOKENS_MEAN, REWARD_MEAN, STEPS_MEAN
from treadle.orchestration.setup.validation import changes, leaves

WIDTH = 9  # updates of the moving average
ALL = "all"  # the label of a curve over all held-out tasks
_SMOOTHED_FROM = 2 * WIDTH  # an average over nearly all there is would say nothing
_MAX_KINDS = 7  # curves of success by a key of the tasks: as many colours as can be told apart, beside `all`
_MAX_KEYS = 3  # in a label, unless more are needed to tell the groups apart
_MAX_VALUE = 40  # characters of a value in a label
_Points = Mapping[int, float]  # update -> value


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """One run: its configuration, and the rows of its metrics.jsonl."""

    config: RunConfig
    rows: Sequence[Mapping[str, Any]]

    @property
    def updates(self) -> int:
        """The last update that is logged; 0 without any."""
        return max((row["update"] for row in self.rows if row["kind"] == "update"), default=0)


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that differ in the seed only, and the label that tells them from the other groups."""

    label: str
    runs: tuple[RunMetrics, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of a group's runs at the updates where all of them have it, so that each mean is over all runs.

    group: its index. measured, values [runs, points]: as logged, and as drawn: moving averages in a long run.
    """

    group: int
    label: str
    updates: tuple[int, ...]
    measured: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean over the runs, [points]."""
        return np.asarray(self.values.mean(axis=0))

    @property
    def is_smoothed(self) -> bool:
        return self.values is not self.measured


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that share a pair of axes.

    greedy: those of greedy evaluations, before and after training. is_share: whether values are between 0 and 1.
    """

    title: str
    curves: tuple[Curve, ...]
    greedy: tuple[Curve, ...] = ()
    is_share: bool = False


def smoothed(values: Sequence[float], width: int = WIDTH) -> list[float]:
    """Return the centred moving average over `width` values; windows are shorter at the ends."""
    half = width // 2
    return [float(np.mean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def group_runs(runs: Iterable[RunMetrics]) -> list[RunGroup]:
    """Return the runs in groups that differ in the seed only, in the order of their first runs."""
    groups: list[list[RunMetrics]] = []
    for run in runs:
        same = next((group for group in groups if not _compared(group[0].config, run.config)), None)
        if same is None:
            groups.append([run])
        else:
            same.append(run)
    labels = _labels([group[0].config for group in groups])
    return [RunGroup(label, tuple(group)) for label, group in zip(labels, groups, strict=True)]


def panels(groups: Sequence[RunGroup]) -> list[Panel]:
    """Return reward, held-out success and lengths over updates; those without a value in any group are left out.

    Of one group, the panel of success also has a curve for each kind of tasks by `data.table_by`; of several, each kind
    has a panel of its own, with a curve for each group.
    """
    kinds = _kinds(groups)
    by_kind = [_success(groups, [kind], kind) for kind in kinds] if len(groups) > 1 else []
    success = _success(groups, [ALL] if len(groups) > 1 else [ALL, *kinds], "all tasks" if by_kind else "")
    candidates = [
        Panel("training reward", _of_updates(groups, REWARD_MEAN.name)),
        success,
        *by_kind,
        Panel("completion tokens per trajectory, training", _of_updates(groups, COMPLETION_TOKENS_MEAN.name)),
        Panel("steps per trajectory, training", _of_updates(groups, STEPS_MEAN.name)),
    ]
    return [panel for panel in candidates if panel.curves or panel.greedy]


def _compared(one: RunConfig, other: RunConfig) -> list[str]:
    """Return the paths in which two configurations differ, beside the seed."""
    return [change.path for change in changes(one, other) if change.path not in ("seed", "about")]


def _labels(configs: Sequence[RunConfig]) -> list[str]:
    """Return what tells the configurations apart: `training.packing=tree, orchestration.updates=60, 4 more keys`."""
    values = [{path: as_override(value) for path, value in leaves(config).items()} for config in configs]
    paths = list(dict.fromkeys(chain.from_iterable(_compared(configs[0], other) for other in configs[1:])))

    def told_apart(by: Sequence[str]) -> int:
        return len({tuple(run.get(path) for path in by) for run in values})

    needed: list[str] = []
    for path in paths:
        if told_apart([*needed, path]) > told_apart(needed):
            needed.append(path)
    others = [path for path in paths if path not in needed]
    shown = needed + others[: max(0, _MAX_KEYS - len(needed))]
    hidden = len(paths) - len(shown)
    more = [f"{hidden} more {'key' if hidden == 1 else 'keys'}"] if hidden else []
    return [", ".join([f"{path}={_short(run.get(path, 'null'))}" for path in shown] + more) for run in values]


def _short(value: str) -> str:
    """Return a long value without its middle: paths differ at their ends."""
    return value if len(value) <= _MAX_VALUE else f"{value[:10]}...{value[13 - _MAX_VALUE :]}"


def _of_updates(groups: Sequence[RunGroup], metric: str) -> tuple[Curve, ...]:
    """Return a curve of the metric for each group that has it."""
    curves = []
    for index, group in enumerate(groups):
        rows = [[row for row in run.rows if row["kind"] == "update"] for run in group.runs]
        points = [{row["update"]: row[metric] for row in run if row.get(metric) is not None} for run in rows]
        curves.append(_curve(index, group.label, points, smooth=True))
    return tuple(curve for curve in curves if curve is not None)


def _success(groups: Sequence[RunGroup], kinds: Sequence[str], of: str) -> Panel:
    """Return the panel of held-out success of these kinds of tasks. of: what follows in its title.

    Greedy evaluations before and after training are curves of their own, where the others are sampled.
    """
    sampled, greedy = [], []
    for index, group in enumerate(groups):
        for kind in kinds:
            label = kind if len(kinds) > 1 else group.label
            sampled.append(_curve(index, label, [_evaluated(run, kind, greedy=False) for run in group.runs]))
        if ALL in kinds:
            greedy.append(_curve(index, group.label, [_evaluated(run, ALL, greedy=True) for run in group.runs]))
    title = "held-out success" + (f", {of}" if of else "")
    made, made_greedily = (tuple(c for c in curves if c is not None) for curves in (sampled, greedy))
    return Panel(title, made, made_greedily, is_share=True)


def _evaluated(run: RunMetrics, kind: str, greedy: bool) -> _Points:
    """Return held-out success by update.

    greedy: of the evaluations at temperature 0 that are made beside those at `evaluation.temperature`.
    """
    always_greedy = run.config.evaluation.temperature == 0
    points = {}
    for row in run.rows:
        if row["kind"] == "evaluation" and (row["temperature"] == 0 and not always_greedy) == greedy:
            value = row["success"] if kind == ALL else _by_kind(run, row, "by").get(kind)
            if value is not None:
                points[row["update"]] = value
    return points


def _by_kind(run: RunMetrics, row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return a column of an evaluation, `by` or `by_tasks`, with the kinds' full names: `hops 1`."""
    return {f"{run.config.data.table_by} {key}": value for key, value in row[column].items()}


def _kinds(groups: Sequence[RunGroup]) -> list[str]:
    """Return the names of the kinds of held-out tasks in order; of many, those with the most tasks."""
    tasks = Counter[str]()
    for run in chain.from_iterable(group.runs for group in groups):
        for row in (row for row in run.rows if row["kind"] == "evaluation"):
            tasks |= Counter(_by_kind(run, row, "by_tasks"))
    largest = {kind for kind, _ in sorted(tasks.items(), key=lambda item: (-item[1], item[0]))[:_MAX_KINDS]}
    return [kind for kind in sorted(tasks) if kind in largest]


def _curve(group: int, label: str, runs: Sequence[_Points], smooth: bool = False) -> Curve | None:
    """Return the curve at the updates that all runs have; None if there are none."""
    updates = sorted(set.intersection(*map(set, runs)))
    if not updates:
        return None
    measured = np.array([[run[update] for update in updates] for run in runs], dtype=np.float64)
    is_long = smooth and len(updates) >= _SMOOTHED_FROM
    values = np.array([smoothed(run.tolist()) for run in measured]) if is_long else measured
    return Curve(group, label, tuple(updates), measured, values)
