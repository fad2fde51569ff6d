"""The picture of runs: their curves in panels, in one colour for each group of runs or for each kind of tasks."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treadle.core.files import write_atomically
from treadle.core.text import escape_line
from treadle.orchestration.reporting.curve import WIDTH, Curve, Panel, RunGroup, RunMetrics, group_runs, panels

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".pdf", ".svg")
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c5a2b", "#000000")
"""Okabe and Ito's colours, which colour-blind readers tell apart (jfly.uni-koeln.de/color); brown for yellow."""
_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")  # for more curves than colours
_MARKERS = "osD^vP*X"
_GREY = "#555555"


def draw_runs(runs: Sequence[RunMetrics], path: Path) -> list[RunGroup]:
    """Draw runs to a file, whose name ends in one of `FORMATS`; returns the groups they are in. Raises OSError."""
    groups = group_runs(runs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # such as those of Chinese
        content = io.BytesIO()
        make_figure(groups, panels(groups)).savefig(content, format=path.suffix[1:], dpi=130)
    write_atomically(path, content.getvalue())
    return groups


def make_figure(groups: Sequence[RunGroup], shown: Sequence[Panel]) -> Figure:
    """Return a figure of the groups' panels, with one legend for all of them."""
    from matplotlib.figure import Figure  # half a second of import, only needed here

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
    """Return `demo, seeds 0, 1, 2`; of several groups, the recipes alone."""
    recipes = ", ".join(dict.fromkeys(run.config.recipe for group in groups for run in group.runs))
    if len(groups) > 1:
        return recipes
    seeds = [str(run.config.seed) for run in groups[0].runs]
    return f"{recipes}, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"


def _draw_panel(axes: Axes, panel: Panel, one_group: bool) -> None:
    """Draw a panel. one_group: whether colours stand for its curves instead of for groups; then it has a legend."""
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
    """Return colour, dashes and marker of a line."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[index // len(_COLOURS) % len(_DASHES)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.7,
    }


def _draw_curve(axes: Axes, curve: Curve, style: dict[str, Any], has_markers: bool) -> None:
    """Draw the mean of the runs, with their range behind it; of a single run that is smoothed, what was measured."""
    if len(curve.values) > 1:
        band = curve.values.min(axis=0), curve.values.max(axis=0)
        axes.fill_between(curve.updates, *band, color=style["color"], alpha=0.18, linewidth=0)
    elif curve.is_smoothed:
        axes.plot(curve.updates, curve.measured[0], color=style["color"], alpha=0.35, linewidth=0.8)
    shown = style if has_markers or not curve.is_smoothed else {**style, "marker": ""}
    axes.plot(curve.updates, curve.mean, label=_text(curve.label, 30), **shown)


def _legend(groups: Sequence[RunGroup], shown: Sequence[Panel], width: int) -> list[tuple[str, Artist]]:
    """Return what is explained below the panels: the groups, if there are several, and how they are drawn.

    width: of a line, in characters.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[tuple[str, Artist]] = []
    sizes = [len(group.runs) for group in groups]
    if len(groups) > 1:
        for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
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
    """Return text of a run in lines of `width`, three at most, as matplotlib shows them unchanged.

    `$` starts no formula, and a `_` in front hides no label.
    """
    lines = textwrap.wrap(escape_line(text), width, max_lines=3, placeholder=" ...")
    shown = "\n".join(lines).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
