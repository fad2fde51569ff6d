"""The simulation of asynchronous training: the real loop in virtual time."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Trained
from treadle.benchmarks import asynchronous
from treadle.benchmarks.simulation import StalenessSettings, World, figures, lognormal, replayed, simulate
from treadle.cli.main import main
from treadle.core.errors import RunError

SMALL = {"steps": 4, "updates": 12, "tasks_per_update": 4, "group_size": 4, "engine_capacity": 16, "training": 40.0}


def world(sigma: float, **sizes: float) -> World:
    settings = {**SMALL, "generation": lognormal(60, sigma), "mean": 60.0, **sizes}
    return World(**settings)  # type: ignore[arg-type]


def test_synchronous_training_takes_the_slowest_trajectory_and_then_the_update() -> None:
    """Everything constant: 60 s, 40 s and 2 s, one after the other; beside each other, only the first."""
    constant = world(0, publication=2.0)
    expected = {"trajectories/s": 16 / 102, "engine idle": 42 / 102, "learner idle": 60 / 102, "staleness max": 0}
    found = figures(constant, simulate(constant, StalenessSettings(0)))
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    beside = figures(constant, simulate(constant, StalenessSettings(2)))
    assert beside["trajectories/s"] == pytest.approx(16 / 60) and beside["of bound"] == pytest.approx(1)
    assert beside["engine idle"] == pytest.approx(0) and beside["dropped"] == 0


@pytest.mark.slow
def test_with_stragglers_staleness_doubles_the_rate_and_reaches_the_bound() -> None:
    """Lognormal, sigma 1: the sizes of docs/async.md, fewer updates."""
    usual = World(lognormal(60, 1), 60.0, updates=30)
    sync, free = (figures(usual, simulate(usual, StalenessSettings(staleness))) for staleness in (0, 8))
    assert free["trajectories/s"] >= 2 * sync["trajectories/s"]
    assert free["of bound"] >= 0.9
    assert free["staleness max"] <= 8


@pytest.mark.parametrize("policy", ["mask_steps", "wait", "drop_group"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_step_is_trained_beyond_the_bound_whatever_becomes_of_it(staleness: int, policy: str) -> None:
    simulated = world(1.5)
    seen = simulate(simulated, StalenessSettings(staleness, policy))  # type: ignore[arg-type]
    found = figures(simulated, seen)
    assert max(seen.staleness) == staleness
    assert (found["dropped"] == 0) == (policy == "wait")
    assert len(seen.trained) == simulated.updates and found["of bound"] <= 1.05
    trained = sum(kept for _, kept, _ in seen.fates(simulated.steps))
    assert trained == sum(sum(update.values()) for update in seen.trained) == len(seen.staleness)
    if policy == "drop_group":
        assert found["s dropped"] > found["s trained"]  # the length bias


def test_the_same_seed_simulates_the_same() -> None:
    first, second = (simulate(world(1), StalenessSettings(3)) for _ in range(2))
    assert first == second != simulate(world(1, seed=1), StalenessSettings(3))


def test_seconds_of_a_distribution() -> None:
    places = [(i + 0.5) / 10_000 for i in range(10_000)]
    assert sum(map(lognormal(60, 1), places)) / 10_000 == pytest.approx(60, rel=0.01)
    assert [lognormal(60, 0)(u) for u in (0.0, 0.5, 0.999)] == pytest.approx([60, 60, 60])
    assert [replayed([3.0, 1.0])(u) for u in (0.0, 0.49, 0.5, 0.999)] == [1, 1, 3, 3]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--updates", "6", "--tasks-per-update", "2", "--group-size", "2", "--steps", "2", "--engine-capacity", "4"]
    output, picture = tmp_path / "async.json", tmp_path / "async.png"
    assert main(["bench", "async", *sizes, "--output", str(output), "--plot", str(picture)]) == 0
    assert "treadle bench async" in capsys.readouterr().out
    rows = json.loads(output.read_text())["rows"]
    assert [(row["max_staleness"], row["stale_policy"]) for row in rows[:4]] == [
        (0, "-"),
        *((1, policy) for policy in ("mask_steps", "wait", "drop_group")),
    ]
    assert len(rows) == 13 and rows[0]["times sync"] == 1
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["async", "--generation", "lognormal:60"], "must be lognormal:MEAN:SIGMA"),
        (["async", "--generation", "lognormal:0:1"], "must be lognormal:MEAN:SIGMA"),
        (["async", "--generation", "lognormal:9:1", "--run", "x"], "give one"),
        (["async", "--group-size", "1"], "--group-size 1: must be 2 or more"),
        (["update", "--engine-capacity", "3"], "--engine-capacity: only 'treadle bench async' simulates"),
    ],
)
def test_what_cannot_be_simulated_is_told(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_recorded_run_gives_its_trajectories_seconds(finished: Trained) -> None:
    report = asynchronous.measure(1, 1, run=finished.path, staleness=(0, 1), updates=5, steps=2)
    assert len(report.rows) == 4 and "recorded, mean" in report.note
    with pytest.raises(RunError, match="is no run directory"):
        asynchronous.measure(1, 1, run=Path("nowhere"))
