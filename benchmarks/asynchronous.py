"""What asynchronous training gains: the real loop in virtual time, with engine and learner simulated.

python -m benchmarks.asynchronous
python -m benchmarks.asynchronous --run runs/NAME                  # seconds drawn from a run's trajectories
python -m benchmarks.asynchronous --generation 300 0.8 --training 120 --engine-capacity 256
python -m benchmarks.asynchronous --plot async.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.measure import Row, Table, make_parser, show
from benchmarks.simulation import Seconds, StalenessSettings, World, figures, lognormal, replayed, simulate
from treadle.loop.config import StalePolicy
from treadle.record.run_directory import RunDirectory

POLICIES: tuple[StalePolicy, ...] = ("mask_steps", "wait", "drop_group")
COLOURS = {"mask_steps": "#2f6db5", "wait": "#5a9e6f", "drop_group": "#d1603d"}
SIZES = {
    "steps": (int, "steps of a trajectory"),
    "training": (float, "seconds of an update"),
    "publication": (float, "seconds until the engine has new weights"),
    "engine_capacity": (int, "steps that the engine samples at a time, each of another trajectory"),
    "tasks_per_update": (int, "groups of an update"),
    "group_size": (int, "trajectories of a group"),
    "updates": (int, "updates"),
    "seed": (int, "seed of all draws"),
}
"""Fields of `World` that are options: type, help."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate each `max_staleness` with each `stale_policy`; print a table and draw the picture."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--generation",
        type=float,
        nargs=2,
        default=(60.0, 1.0),
        metavar=("MEAN", "SIGMA"),
        help="lognormal seconds of a trajectory (default: 60 1)",
    )
    parser.add_argument("--run", type=Path, help="draw the seconds from the trajectories of this run instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures to a .png")
    for name, (kind, text) in SIZES.items():
        default = World.__dataclass_fields__[name].default
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default})")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in SIZES}
    if options.small:
        sizes |= {"steps": 2, "updates": 6, "tasks_per_update": 2, "group_size": 2, "engine_capacity": 4}
    if options.run:
        seconds = recorded_seconds(options.run)
        distribution: Seconds = replayed(seconds)
        mean, what = fmean(seconds), f"drawn from {len(seconds)} recorded ones"
    else:
        mean, sigma = options.generation
        distribution, what = lognormal(mean, sigma), f"lognormal, sigma {sigma:g}"
    world = World(distribution, mean, **sizes)
    settings = [StalenessSettings(0)]
    settings += [StalenessSettings(s, policy) for s in ((1,) if options.small else (1, 2, 4, 8)) for policy in POLICIES]
    rows = measure(world, settings)
    show(options.json, Table("asynchronous", note(world, what), rows))
    if options.plot:
        draw(rows, options.plot)


def recorded_seconds(run: Path) -> list[float]:
    """Return the seconds of a run's training trajectories."""
    seconds = [row["seconds"] for row in RunDirectory.open(run).ledger().training() if row["seconds"] > 0]
    if not seconds:
        raise SystemExit(f"run {str(run)!r} has no training trajectory")
    return seconds


def measure(world: World, settings: Sequence[StalenessSettings]) -> list[Row]:
    """Simulate the world under each of the settings; the first is what rates are compared with."""
    rows: list[Row] = []
    for choice in settings:
        result = figures(world, simulate(world, choice))
        rate = result["trajectories/s"]
        rows.append(
            {
                "max_staleness": choice.max_staleness,
                "stale_policy": choice.stale_policy if choice.max_staleness else "-",
                "trajectories/s": rate,
                "times sync": rate / float(rows[0]["trajectories/s"]) if rows else 1.0,
                **result,
                "s dropped": result["s dropped"] or "-",
            }
        )
    return rows


def note(world: World, what: str) -> str:
    """Describe the world under the table. what: how the seconds of a trajectory are distributed."""
    return (
        f"virtual time; a trajectory: mean {world.mean:.3g} s, {what}, in {world.steps} steps, "
        f"{world.engine_capacity} at a time; an update: {world.tasks_per_update} x {world.group_size} trajectories, "
        f"{world.training:g} s, and {world.publication:g} s to publish; {world.updates} updates; "
        f"bound: {world.bound:.3g} trajectories/s; s: of a trajectory, averaged over trained and dropped steps"
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw throughput and share dropped over max_staleness."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = (("of bound", "trajectories/s, share of the bound"), ("dropped", "share of steps dropped"))
    for axes, (column, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for policy, colour in COLOURS.items():
            line = [row for row in rows if row["stale_policy"] in (policy, "-")]
            x, y = [row["max_staleness"] for row in line], [row[column] for row in line]
            axes.plot(x, y, "o-", color=colour, markersize=4, label=f"stale_policy: {policy}")
        axes.set(xlabel="max_staleness", ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.25)
    axes.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    main()
