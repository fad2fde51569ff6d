"""The picture of a run: reward in training and success on held-out tasks over updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 9  # updates of the moving average


def smoothed(values: Sequence[float], width: int = WIDTH) -> list[float]:
    """Return the centred moving average over `width` values; windows are shorter at the ends."""
    half = width // 2
    return [float(np.mean(values[max(0, i - half) : i + half + 1])) for i in range(len(values))]


def draw_curve(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw the rows of metrics.jsonl to a PNG. Raises OSError."""
    from matplotlib.figure import Figure  # half a second of import, only needed here

    updates = [row for row in metrics if row["kind"] == "update" and row["reward_mean"] is not None]
    evaluations = [row for row in metrics if row["kind"] == "evaluation"]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    if updates:
        x, reward = [row["update"] for row in updates], [row["reward_mean"] for row in updates]
        if len(reward) < 2 * WIDTH:  # an average over nearly all there is would say nothing
            axes.plot(x, reward, ".-", color="#2f6db5", linewidth=1.8, label="reward in training")
        else:
            axes.plot(x, reward, color="#9db8d9", linewidth=0.8, label="reward in training")
            label = f"... moving average over {WIDTH} updates"
            axes.plot(x, smoothed(reward), color="#2f6db5", linewidth=1.8, label=label)
    for greedy, style in ((False, "o-"), (True, "s")):
        points = [row for row in evaluations if (row["temperature"] == 0) == greedy and row["success"] is not None]
        if points:
            label = "held-out success, " + ("greedy" if greedy else f"temperature {points[0]['temperature']:g}")
            axes.plot(
                [r["update"] for r in points],
                [r["success"] for r in points],
                style,
                color="#d1603d",
                label=label,
                alpha=0.5 if greedy else 1.0,
                markersize=5,
            )
    axes.set(xlabel="update", ylabel="reward, success", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=140)
