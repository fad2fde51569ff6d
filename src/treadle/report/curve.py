"""Curves of runs as plain data, for `treadle plot` and the picture at the end of a training.

runs --group_runs--> groups that differ only in the seed --panels--> panels of curves --draw_runs--> PNG
"""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from treadle.core.config import as_override
from treadle.core.errors import ConfigError
from treadle.core.files import write_atomically
from treadle.core.text import escape_line
from treadle.report.metrics import COMPLETION_TOKENS_MEAN, REWARD_MEAN, STEPS_MEAN

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9  # updates of the moving average
ALL = "all"  # label of curves over all held-out tasks
_SMOOTHED_FROM = 2 * WIDTH  # an average over nearly all values would be meaningless
_MAX_KINDS = 7  # success curves by a key of the tasks: number of distinguishable colors, beside `all`
_MAX_KEYS = 3  # per label, unless more are needed to distinguish the groups
_MAX_VALUE = 40  # maximum characters of a value in a label
_Points = Mapping[int, float]  # update -> value


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """Settings of a run, path -> value (`core.config_diff.leaves`), and the rows of its metrics.jsonl."""

    settings: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def updates(self) -> int:
        """The last logged update; 0 without any."""
        return max((row["update"] for row in self.rows if row["kind"] == "update"), default=0)


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs that differ only in the seed. settings: the ones that distinguish them from other groups,
    `training.packing=tree`.

    hidden: number of other settings that differ between groups.
    """

    settings: tuple[str, ...]
    hidden: int
    runs: tuple[RunMetrics, ...]

    @property
    def label(self) -> str:
        """`training.packing=tree, orchestration.updates=60, 4 more keys`."""
        more = [f"{self.hidden} more {'key' if self.hidden == 1 else 'keys'}"] if self.hidden else []
        return ", ".join([*self.settings, *more])


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of a group's runs at the updates present in all of them, so that each mean is over all runs.

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
    """Curves that share a pair of axes. greedy: of greedy evaluations. is_share: whether values are between 0 and 1."""

    title: str
    curves: tuple[Curve, ...]
    greedy: tuple[Curve, ...] = ()
    is_share: bool = False


def smoothed(values: Sequence[float], width: int = WIDTH) -> list[float]:
    """Return the centered moving average over `width` values; windows are shorter at the ends."""
    half = width // 2
    return [float(np.mean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def group_runs(runs: Iterable[RunMetrics]) -> list[RunGroup]:
    """Group runs that differ only in the seed, in the order of their first runs."""
    groups = defaultdict[str, list[RunMetrics]](list)
    for run in runs:
        groups[repr({**run.settings, "seed": 0, "about": ""})].append(run)
    settings, hidden = _told_apart([group[0].settings for group in groups.values()])
    return [RunGroup(own, hidden, tuple(group)) for own, group in zip(settings, groups.values(), strict=True)]


def panels(groups: Sequence[RunGroup]) -> list[Panel]:
    """Return reward, held-out success and lengths over updates, without those missing in all groups.

    For one group, the panel of success also has a curve per kind of tasks by `data.table_by`; for several, each kind
    has a separate panel, with a curve per group.
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


def _told_apart(runs: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, ...]], int]:
    """Return the settings that distinguish each run from the others, and the number of further differing ones."""
    values = [{path: as_override(value) for path, value in run.items()} for run in runs]
    known = dict.fromkeys(path for run in runs for path in run)
    differing = (path for path in known if any(run.get(path) != runs[0].get(path) for run in runs))
    paths = [path for path in differing if path not in ("seed", "about")]

    def told_apart(by: Sequence[str]) -> int:
        return len({tuple(run.get(path) for path in by) for run in values})

    needed: list[str] = []
    for path in paths:
        if told_apart([*needed, path]) > told_apart(needed):
            needed.append(path)
    others = [path for path in paths if path not in needed]
    shown = needed + others[: max(0, _MAX_KEYS - len(needed))]
    settings = [tuple(f"{path}={_short(run.get(path, 'null'))}" for path in shown) for run in values]
    return settings, len(paths) - len(shown)


def _short(value: str) -> str:
    """Shorten a long value in the middle, because paths differ at their ends."""
    return value if len(value) <= _MAX_VALUE else f"{value[:10]}...{value[13 - _MAX_VALUE :]}"


def _of_updates(groups: Sequence[RunGroup], metric: str) -> tuple[Curve, ...]:
    def points(run: RunMetrics) -> _Points:
        rows = [row for row in run.rows if row["kind"] == "update"]
        return {row["update"]: row[metric] for row in rows if row.get(metric) is not None}

    return _curves([(n, group.label, [points(run) for run in group.runs]) for n, group in enumerate(groups)], True)


def _success(groups: Sequence[RunGroup], kinds: Sequence[str], of: str) -> Panel:
    """Return the panel of held-out success of these kinds of tasks. of: end of its title."""

    def curves(kinds: Sequence[str], greedy: bool) -> tuple[Curve, ...]:
        return _curves(
            [
                (n, kind if len(kinds) > 1 else group.label, [_evaluated(run, kind, greedy) for run in group.runs])
                for n, group in enumerate(groups)
                for kind in kinds
            ]
        )

    title = "held-out success" + (f", {of}" if of else "")
    return Panel(title, curves(kinds, False), curves([kind for kind in kinds if kind == ALL], True), is_share=True)


def _evaluated(run: RunMetrics, kind: str, greedy: bool) -> _Points:
    """Return held-out success by update. greedy: use the evaluations at temperature 0 beside the sampled ones."""
    always_greedy = run.settings["evaluation.temperature"] == 0
    points = {}
    for row in run.rows:
        if row["kind"] == "evaluation" and (row["temperature"] == 0 and not always_greedy) == greedy:
            value = row["success"] if kind == ALL else _by_kind(run, row, "by").get(kind)
            if value is not None:
                points[row["update"]] = value
    return points


def _by_kind(run: RunMetrics, row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return a column of an evaluation, `by` or `by_tasks`, with the kinds' full names: `hops 1`."""
    return {f"{run.settings['data.table_by']} {key}": value for key, value in row[column].items()}


def _kinds(groups: Sequence[RunGroup]) -> list[str]:
    """Return the names of the kinds of held-out tasks in order; the largest ones if there are many."""
    tasks = Counter[str]()
    for run in chain.from_iterable(group.runs for group in groups):
        for row in (row for row in run.rows if row["kind"] == "evaluation"):
            tasks |= Counter(_by_kind(run, row, "by_tasks"))
    largest = {kind for kind, _ in sorted(tasks.items(), key=lambda item: (-item[1], item[0]))[:_MAX_KINDS]}
    return [kind for kind in sorted(tasks) if kind in largest]


def _curves(figures: Iterable[tuple[int, str, Sequence[_Points]]], smooth: bool = False) -> tuple[Curve, ...]:
    """Return the curve of each (group, label, points of its runs), unless its runs have no update in common."""
    curves = []
    for group, label, runs in figures:
        if updates := sorted(set.intersection(*map(set, runs))):
            measured = np.array([[run[update] for update in updates] for run in runs], dtype=np.float64)
            is_long = smooth and len(updates) >= _SMOOTHED_FROM
            values = np.array([smoothed(run.tolist()) for run in measured]) if is_long else measured
            curves.append(Curve(group, label, tuple(updates), measured, values))
    return tuple(curves)


FORMATS = (".png", ".pdf", ".svg")
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c5a2b", "#000000")
"""Okabe and Ito's colors, distinguishable to color-blind readers (jfly.uni-koeln.de/color); brown for yellow."""
_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")  # for more curves than colors
_MARKERS = "osD^vP*X"
_GREY = "#555555"


def draw_runs(runs: Sequence[RunMetrics], path: Path, labels: Sequence[str] = ()) -> list[RunGroup]:
    """Draw runs to a file with a suffix of `FORMATS`; return their groups. labels: in place of the keys that differ.

    Raises ConfigError unless there are as many labels as groups, or none; OSError.
    """
    groups = group_runs(runs)
    if labels:
        if len(labels) != len(groups):
            order = "; ".join(group.label or "(one line)" for group in groups)
            raise ConfigError(f"labels: got {len(labels)}, expected {len(groups)}, one for each line: {order}")
        groups = [replace(g, settings=(label,), hidden=0) for g, label in zip(groups, labels, strict=True)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # for example Chinese characters
        content = io.BytesIO()
        make_figure(groups, panels(groups)).savefig(content, format=path.suffix[1:], dpi=130)
    write_atomically(path, content.getvalue())
    return groups


def make_figure(groups: Sequence[RunGroup], shown: Sequence[Panel]) -> Figure:
    """Return a figure of the groups' panels, with one legend for all of them."""
    # Half a second of import, only needed here.
    from matplotlib.figure import Figure

    columns = max(1, min(len(shown), 2 if len(shown) <= 4 else 3))
    rows = max(1, math.ceil(len(shown) / columns))
    entries = _legend(groups, shown, width=60 * columns)
    lines = sum(1 + label.count("\n") for label, _ in entries)
    size = (4.6 * columns, 3.1 * rows + 0.5 + 0.22 * lines)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    figure.suptitle(_text(_title(groups), 42 * columns), fontsize=12)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    last = max((curve.updates[-1] for panel in shown for curve in (*panel.curves, *panel.greedy)), default=1)
    for pair, panel in zip(axes, shown, strict=False):
        _draw_panel(pair, panel, one_group=len(groups) == 1)
        pair.set_xlim(-0.03 * last, 1.03 * last)  # the same updates in all panels
    for pair in axes[len(shown) :]:
        pair.set_axis_off()
    if entries:
        labels, handles = zip(*entries, strict=True)
        figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=9)
    return figure


def _title(groups: Sequence[RunGroup]) -> str:
    recipes = ", ".join(dict.fromkeys(run.settings["recipe"] for group in groups for run in group.runs))
    if len(groups) > 1:
        return recipes
    seeds = [str(run.settings["seed"]) for run in groups[0].runs]
    return f"{recipes}, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"


def _draw_panel(axes: Axes, panel: Panel, one_group: bool) -> None:
    """Draw a panel. one_group: whether colors stand for its curves instead of for groups; it then has a legend."""
    from matplotlib.ticker import MaxNLocator

    for index, curve in enumerate(panel.curves):
        _draw_curve(axes, curve, _style(index if one_group else curve.group), has_markers=panel.is_share)
    for curve in panel.greedy:
        colour = _style(curve.group)["color"]
        axes.plot(curve.updates, curve.mean, "s", color=colour, markersize=6, markerfacecolor="white", zorder=3)
    axes.set_title(_text(panel.title, 50), fontsize=10)
    axes.set_xlabel("update", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if panel.is_share:
        axes.set_ylim(-0.03, 1.03)
    if one_group and len(panel.curves) > 1:
        axes.legend(loc="best", fontsize=8, framealpha=0.7, edgecolor="none")


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.7,
    }


def _draw_curve(axes: Axes, curve: Curve, style: dict[str, Any], has_markers: bool) -> None:
    """Draw the mean of the runs, with their range behind it; for a smoothed single run, the raw values."""
    if len(curve.values) > 1:
        band = curve.values.min(axis=0), curve.values.max(axis=0)
        axes.fill_between(curve.updates, *band, color=style["color"], alpha=0.18, linewidth=0)
    elif curve.is_smoothed:
        axes.plot(curve.updates, curve.measured[0], color=style["color"], alpha=0.35, linewidth=0.8)
    shown = style if has_markers or not curve.is_smoothed else {**style, "marker": ""}
    axes.plot(curve.updates, curve.mean, label=_text(curve.label, 30), **shown)


def _legend(groups: Sequence[RunGroup], shown: Sequence[Panel], width: int) -> list[tuple[str, Artist]]:
    """Describe the groups, if there are several, and their line styles. width: of a line, in characters."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[tuple[str, Artist]] = []
    sizes = [len(group.runs) for group in groups]
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True) if len(groups) > 1 else ()):
        label = _text(f"{group.label} ({size} run{'s' if size > 1 else ''})", width)
        entries.append((label, Line2D([], [], **_style(index))))
    if max(sizes) > 1:
        of = f"{sizes[0]} runs" if len(groups) == 1 else "runs"
        label = f"line: mean over {of} that differ in the seed only; band: from the lowest of them to the highest"
        entries.append((label, Patch(color=_GREY, alpha=0.3)))
    if any(curve.is_smoothed for panel in shown for curve in panel.curves):
        faint = "; faint: each update" if 1 in sizes else ""
        entries.append((f"training: moving average over {WIDTH} updates{faint}", Line2D([], [], color=_GREY)))
    if any(panel.greedy for panel in shown):
        square = Line2D([], [], color=_GREY, marker="s", linestyle="", markerfacecolor="white")
        entries.append(("greedy, all held-out tasks", square))
    return entries


def _text(text: str, width: int) -> str:
    """Return at most three lines of `width`, escaped so that `$` starts no formula and a leading `_` hides no label."""
    lines = textwrap.wrap(escape_line(text), width, max_lines=3, placeholder=" ...")
    shown = "\n".join(lines).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
