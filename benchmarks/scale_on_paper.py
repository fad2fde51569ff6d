"""A training run at 8 to 4,096 GPUs, on paper: GPU seconds of a trajectory, and what the loop makes of them.

    python -m benchmarks.scale_on_paper

Of rates and memory per GPU nothing is measured: they follow from data sheets and assumed efficiencies (`Hardware`). The
loop is the real one in virtual time (`benchmarks.simulation`), of a slice of the run whose batch is 64
trajectories: what decides is how long a trajectory takes beside an update. What the run's own process needs for a
trajectory is measured, on a CPU (`many_sessions.json`).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulation import StalenessSettings, World, figures, lognormal, simulate

RESULTS = Path(__file__).parent / "results"
SIZES = {8: 256, 64: 512, 512: 2048, 4096: 8192}
"""GPUs -> trajectories of an update."""
SLICE = 64  # trajectories of an update in the simulator
UPDATES = 150


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, an H100 SXM by its data sheet, and the share of it that is assumed to be used."""

    flops: float = 989e12  # bfloat16, dense, a second
    bandwidth: float = 3.35e12  # bytes a second
    memory: float = 80e9
    compute_share: float = 0.4
    bandwidth_share: float = 0.6


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder of 7.6 billion parameters, in the shape of Qwen2.5-7B."""

    parameters: float = 7.6e9
    layers: int = 28
    kv_heads: int = 4
    head: int = 128

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of one token, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head * 2


@dataclass(frozen=True, slots=True)
class Episode:
    """A trajectory: tokens of prompt, replies, observations; and seconds of the environment a turn."""

    prompt: int = 1_000
    turns: int = 8
    completion: int = 300
    observation: int = 500
    environment: float = 4.0

    @property
    def sampled(self) -> int:
        return self.turns * self.completion

    @property
    def tokens(self) -> int:
        return self.prompt + self.turns * (self.completion + self.observation)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one trajectory. GPU seconds: rollout, training. open: episodes that one GPU's cache holds.

    seconds: that it takes, with the environment's.
    """

    rollout: float
    training: float
    open: float
    seconds: float


def cost(gpu: Hardware, model: Model, episode: Episode) -> Cost:
    """Return the cost by the formulas of docs/scale.md."""
    held = (episode.prompt + episode.tokens) / 2  # tokens in the cache, on average
    weights = 2 * model.parameters
    places = (0.9 * gpu.memory - weights - 4e9) / (model.cache_bytes * held)
    step = weights / (gpu.bandwidth * gpu.bandwidth_share)

    def seconds_a_token(batch: float) -> float:
        return step + batch * held * model.cache_bytes / (gpu.bandwidth * gpu.bandwidth_share)

    batch = places
    for _ in range(50):  # of the open episodes those that sample: the others are in their environments
        sampling = episode.sampled * seconds_a_token(batch)
        batch = places * sampling / (sampling + episode.turns * episode.environment)
    prefill = 2 * model.parameters * (episode.tokens - episode.sampled) / (gpu.flops * gpu.compute_share)
    decode = episode.sampled * seconds_a_token(batch) / batch
    seconds = episode.sampled * seconds_a_token(batch) + episode.turns * episode.environment
    training = 8 * model.parameters * episode.tokens / (gpu.flops * gpu.compute_share)  # layers are computed twice
    return Cost(prefill + decode, training, places, seconds)


def at_size(gpus: int, batch: int, spent: Cost, driver_ms: float) -> dict[str, Any]:
    """Return the figures of a run with so many GPUs, divided so that engines and learner keep up with each other."""
    learner = max(1, round(gpus * spent.training / (spent.training + spent.rollout)))
    engines = gpus - learner
    training, publication = batch * spent.training / learner, 2.0 if gpus <= 8 else 4.0
    capacity = engines / spent.rollout * spent.seconds  # Little's law: open episodes that keep the engines busy
    staleness = math.ceil(2 * capacity / batch)  # the longest episodes take a few times the mean
    rows = {}
    for name, bound in (("synchronous", 0), ("asynchronous", staleness)):
        world = World(
            lognormal(spent.seconds, 0.6),
            spent.seconds,
            training=training,
            publication=publication,
            engine_capacity=max(1, round(capacity * SLICE / batch)),
            updates=20 if bound == 0 else UPDATES,
        )
        row = figures(world, simulate(world, StalenessSettings(bound)))
        rows[name] = {key: row[key] for key in ("engine idle", "learner idle", "staleness mean", "dropped")}
        rows[name]["trajectories/s"] = row["trajectories/s"] * batch / SLICE
    rate = rows["asynchronous"]["trajectories/s"]
    return {
        "gpus": gpus,
        "batch": batch,
        "learner": learner,
        "engines": engines,
        "update_seconds": training,
        "publication_seconds": publication,
        "open_episodes": capacity,
        "max_staleness": staleness,
        **rows,
        "driver_cores": rate * driver_ms / 1e3,
        "environments": rate * Episode().turns * Episode().environment,
    }


def main() -> None:
    """Compute, simulate, and write the results."""
    sessions = json.loads((RESULTS / "many_sessions.json").read_text(encoding="utf-8"))["rows"]
    measured = next(row for row in sessions if row["through"] == "ray")  # the first: the machine had cores to spare
    driver_ms = measured["cpu_ms_per_trajectory"]
    spent = cost(Hardware(), Model(), Episode())
    rows = []
    for gpus, batch in SIZES.items():
        rows.append(at_size(gpus, batch, spent, driver_ms))
        print(json.dumps(rows[-1]))
    data = {"benchmark": "scale_on_paper", "of a trajectory": asdict(spent), "driver_ms": driver_ms, "rows": rows}
    (RESULTS / "scale_on_paper.json").write_text(json.dumps(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
