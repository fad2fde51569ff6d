"""What asynchronous training gains: the real loop, engine and learner simulated, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

from treadle.benchmarks.report import Report, Row
from treadle.benchmarks.simulation import Seconds, StalenessSettings, World, figures, lognormal, replayed, simulate
from treadle.core.errors import ConfigError, RunError
from treadle.orchestration.sampling.replay_buffer import StalePolicy
from treadle.orchestration.store.run_directory import RunDirectory

_POLICIES: tuple[StalePolicy, ...] = ("mask_steps", "wait", "drop_group")
_COLOURS = {"mask_steps": "#2f6db5", "wait": "#5a9e6f", "drop_group": "#d1603d"}
_GENERATION = "lognormal:60:1"


def measure(
    threads: int,
    repeats: int,
    *,
    generation: str | None = None,
    run: Path | None = None,
    plot: Path | None = None,
    staleness: Sequence[int] = (0, 1, 2, 4, 8),
    **sizes: Any,
) -> Report:
    """Simulate each `max_staleness` with each `stale_policy`, a row each; `threads` and `repeats` have no effect.

    generation: `lognormal:MEAN:SIGMA`; run: draw from the seconds of its trajectories instead. plot: a PNG to write.
    sizes: of the `World`. Raises ConfigError and RunError.
    """
    seconds, mean, text = _of_run(run) if run is not None else _of_text(generation or _GENERATION)
    world = World(seconds, mean, **sizes)
    choices = [StalenessSettings(s, policy) for s in staleness for policy in (_POLICIES if s else _POLICIES[:1])]
    found = [figures(world, simulate(world, settings)) for settings in choices]
    rows = [_row(settings, own, found[0]) for settings, own in zip(choices, found, strict=True)]
    if plot is not None:
        _draw(rows, plot)
    return Report("async", _note(world, text), rows)


def _row(settings: StalenessSettings, found: dict[str, float], first: dict[str, float]) -> Row:
    rate = found["trajectories/s"]
    ratio = {"trajectories/s": rate, "times sync": rate / first["trajectories/s"]}
    policy = settings.stale_policy if settings.max_staleness else "-"
    dropped = {"s dropped": found["s dropped"] or "-"}
    return {"max_staleness": settings.max_staleness, "stale_policy": policy, **ratio, **found, **dropped}


def _of_text(text: str) -> tuple[Seconds, float, str]:
    """The distribution, its mean, and what to call it."""
    kind, _, numbers = text.partition(":")
    try:
        mean, sigma = map(float, numbers.split(":"))
    except ValueError:
        mean, sigma = 0.0, 0.0
    if kind != "lognormal" or not (0 < mean < float("inf") and 0 <= sigma < 10):
        raise ConfigError(
            f"--generation {text}: must be lognormal:MEAN:SIGMA with MEAN > 0 seconds and SIGMA in [0, 10), "
            f"such as {_GENERATION}"
        )
    return lognormal(mean, sigma), mean, f"a trajectory: lognormal, mean {mean:g} s, sigma {sigma:g}"


def _of_run(path: Path) -> tuple[Seconds, float, str]:
    """The same of a recorded run's training trajectories."""
    with closing(RunDirectory.open(path).ledger()) as ledger:
        rows = ledger.query(
            "SELECT t.seconds FROM trajectories t JOIN groups g USING (group_id) "
            "WHERE g.split = 'train' AND t.seconds > 0"
        )
    if not rows:
        raise RunError(f"run {str(path)!r} has recorded no training trajectory")
    seconds = [row["seconds"] for row in rows]
    mean = fmean(seconds)
    return replayed(seconds), mean, f"a trajectory: drawn from {len(seconds)} recorded, mean {mean:.3g} s"


def _note(world: World, text: str) -> str:
    return (
        f"virtual time; {text}, in {world.steps} steps, {world.engine_capacity} at a time; "
        f"an update: {world.tasks_per_update} x {world.group_size} trajectories, {world.training:g} s, "
        f"and {world.publication:g} s to publish; {world.updates} updates; "
        f"bound: {world.bound:.3g} trajectories/s; s: of a trajectory, averaged over trained and dropped steps"
    )


def _draw(rows: Sequence[Row], path: Path) -> None:
    """Throughput and share dropped over max_staleness. Raises OSError."""
    from matplotlib.figure import Figure  # half a second of import, only needed here

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = (("of bound", "trajectories/s, share of the bound"), ("dropped", "share of steps dropped"))
    for axes, (column, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for policy, colour in _COLOURS.items():
            own = [row for row in rows if row["stale_policy"] in (policy, "-")]
            x, y = [row["max_staleness"] for row in own], [row[column] for row in own]
            axes.plot(x, y, "o-", color=colour, markersize=4, label=f"stale_policy: {policy}")
        axes.set(xlabel="max_staleness", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.25)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=140)
