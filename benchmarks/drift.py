"""Training on what a quantized, stale engine samples, with and without centered scores: a table and a picture.

    python -m benchmarks.drift --runs runs/drift --jobs 2
    python -m benchmarks.drift --runs runs/drift --plot docs/images/drift.png     # of runs that are complete

The engine samples by the weights of two updates before, each row of each matrix rounded to 8 or 4 bits. It waits for
the learner, so that runs repeat bit for bit; asynchronous training samples from weights as old, when it keeps up.
Runs that are complete in `--runs` are not repeated.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import Row, Table, make_parser, show
from treadle.api.train import train_run
from treadle.core.engine import Engine
from treadle.core.trainer import Trainer, WeightSource, WeightSync
from treadle.engines.staging import InProcess
from treadle.engines.torch.pinned import LocalEngine
from treadle.loop.engines import EngineSpec, open_torch
from treadle.loop.runtime import Runtime
from treadle.plan.config import load_recipe
from treadle.plan.inputs import load_inputs
from treadle.record.run_directory import RunDirectory
from treadle.rendering.chat import ChatRenderer
from treadle.report.progress import Progress

BEHIND = 2  # versions
BITS, SCORES, SEEDS = (8, 4), ("off", "vocabulary"), (0, 1, 2)
COLOURS = {"off": "#d1603d", "vocabulary": "#2f6db5"}
SETTINGS = (
    *("warm_start.options.expert=0.6", "training.optimizer.learning_rate=5e-4", "training.group_size=8"),
    *("orchestration.updates=100", "orchestration.checkpoint_every=100", "training.threads=1", "engine.lock_step=true"),
)
FIGURES = {"success": "success of what was sampled", "logprob_gap_kl": "KL to the sampler, nats a token"}
WINDOW = 5  # updates averaged in the picture
ENDS = 10  # updates averaged in the table


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not complete yet; print the table and draw the picture."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/drift"), help="directory of the runs (default: runs/drift)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures to a .png")
    options = parser.parse_args(arguments)
    seeds = SEEDS[:1] if options.small else SEEDS
    small = ("orchestration.updates=3", "warm_start.steps=3") if options.small else ()
    runs = [
        (options.runs / f"{bits}bits-{scores}-{seed}", bits, scores, seed, small)
        for seed in seeds
        for bits in BITS
        for scores in SCORES
    ]
    missing = [run for run in runs if not (run[0] / "summary.json").is_file()]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for trained in [pool.submit(train, *run) for run in missing]:
            trained.result()
    updates = {run[:4]: updates_of(run[0]) for run in runs}
    show(options.json, Table("drift", f"arithmetic {' '.join(SETTINGS)}; by seed", table(updates)))
    if options.plot:
        draw(options.plot, updates)


Updates = dict[tuple[Path, int, str, int], list[dict[str, Any]]]


def updates_of(path: Path) -> list[dict[str, Any]]:
    return [row for row in RunDirectory.open(path).metrics() if row["kind"] == "update"]


def table(updates: Updates) -> list[Row]:
    """Return a row for each number of bits and way to score: figures of single seeds in the last updates."""
    rows: list[Row] = []
    for bits in BITS:
        for scores in SCORES:
            own = [rows for (_, b, s, _), rows in updates.items() if (b, s) == (bits, scores)]
            success = [fmean(row["success"] for row in rows[-ENDS:]) for rows in own]
            kl = [fmean(row["logprob_gap_kl"] for row in rows) for rows in own]
            rows.append(
                {
                    "bits": bits,
                    "centered_scores": scores,
                    f"success, last {ENDS} updates": " / ".join(f"{value:.3f}" for value in success),
                    "KL to the sampler, all updates": " / ".join(f"{value:.4f}" for value in kl),
                    "mean success": fmean(success),
                    "mean KL": fmean(kl),
                }
            )
    return rows


def draw(file: Path, updates: Updates) -> None:
    """Draw success and KL by update: thin lines are seeds, thick ones their means."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots(len(FIGURES), len(BITS), sharex=True, sharey="row")
    for column, bits in enumerate(BITS):
        axes[0][column].set_title(f"engine rounded to {bits} bits, {BEHIND} versions behind")
        for row, (name, text) in enumerate(FIGURES.items()):
            axis = axes[row][column]
            for scores in SCORES:
                own = [rows for (_, b, s, _), rows in updates.items() if (b, s) == (bits, scores)]
                lines = [np.convolve([row[name] for row in rows], np.ones(WINDOW) / WINDOW, "valid") for rows in own]
                x = np.arange(len(lines[0])) + (WINDOW + 1) / 2
                for line in lines:
                    axis.plot(x, line, color=COLOURS[scores], linewidth=0.7, alpha=0.5)
                axis.plot(x, np.mean(lines, axis=0), color=COLOURS[scores], linewidth=2.2, label=scores)
            axis.grid(alpha=0.3)
            if not column:
                axis.set_ylabel(text)
        axes[1][column].set_yscale("log")
    axes[0][0].legend(title="centered_scores")
    for axis in axes[-1]:
        axis.set_xlabel("update")
    figure.savefig(file, dpi=100)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Return a matrix with each row rounded to multiples of its largest magnitude / (2^(bits - 1) - 1)."""
    if weight.ndim < 2:
        return weight.clone()
    step = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    made: Tensor = torch.round(weight / step) * step
    return made


@dataclass(slots=True)
class QuantizedSync:
    """Publishes rounded weights, `BEHIND` versions late."""

    source: WeightSource
    engine: LocalEngine
    bits: int
    published: list[dict[str, Tensor]] = field(default_factory=list)

    async def publish(self, version: int) -> None:
        weights = await self.source.stage(InProcess())
        made = {name: rounded(weight.detach(), self.bits) for name, weight in weights.items()}
        self.published = [*self.published, made][-BEHIND - 1 :]
        await self.engine.update_weights(self.published[0], version)


def quantized(bits: int) -> Runtime:
    """Return a runtime with an engine like that, which does not compute as the learner does, and is not compared."""

    async def opened(spec: EngineSpec) -> tuple[Engine, WeightSync]:
        engine, _ = await open_torch(spec)
        assert isinstance(engine, LocalEngine)
        return engine, QuantizedSync(spec.source, engine, bits)

    async def unchecked(
        engine: Engine, sync: WeightSync, trainer: Trainer, renderer: ChatRenderer, gap: float, sees: bool
    ) -> None:
        await sync.publish(0)

    return Runtime(open_engine=opened, check_engine=unchecked)


def train(path: Path, bits: int, scores: str, seed: int, settings: Sequence[str]) -> None:
    config = load_recipe("arithmetic", [*SETTINGS, f"algorithm.centered_scores={scores}", f"seed={seed}", *settings])
    train_run(config, load_inputs(config), path, Progress(), runtime=quantized(bits))


if __name__ == "__main__":
    main()
