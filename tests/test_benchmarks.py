"""Benchmarks run at their smallest sizes, and what the simulator of the loop shows."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import drift, filters, gpu_check, packing
from benchmarks.simulation import StalenessSettings, World, figures, lognormal, simulate
from tests.runs import start

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["rollout", "update", "packing", "datums", "merge", "gateway", "render", "asynchronous", "kv", "scaling"]
)
def test_a_benchmark_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--small", "--json", str(tmp_path / "figures.json")]
    options += ["--repeats", "1"] if name not in ("asynchronous", "kv") else []
    importlib.import_module(f"benchmarks.{name}").main(options)
    tables = json.loads((tmp_path / "figures.json").read_text())["tables"]
    assert tables[0]["title"] == name in capsys.readouterr().out
    assert all(list(row) == list(table["rows"][0]) for table in tables for row in table["rows"])


@pytest.mark.slow
def test_recorded_supports_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path / "run", "rollout.top_p=0.9", "orchestration.updates=1")
    filters.main([str(tmp_path / "run"), "--repeats", "1"])
    assert "bytes a token" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_drift_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drift.main(["--small", "--runs", str(tmp_path / "runs"), "--plot", str(tmp_path / "drift.png")])
    assert "vocabulary" in capsys.readouterr().out
    assert (tmp_path / "drift.png").stat().st_size > 10000


def test_weights_are_rounded_by_row() -> None:
    weights = drift.rounded(torch.tensor([[0.9, -7.0, 3.4], [0.0, 0.0, 0.0]]), bits=4)
    assert weights.tolist() == [[1.0, -7.0, 3.0], [0.0, 0.0, 0.0]]


@pytest.mark.slow
def test_trees_are_measured_against_chains(capsys: pytest.CaptureFixture[str]) -> None:
    packing.main(["--small", "--repeats", "1", "--budget", "20"])
    assert "trees against chains" in capsys.readouterr().out


@pytest.mark.slow
def test_a_study_trains_a_recipe_and_prints_its_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.recipe_runs", "demo-seeds", "--seeds", "0", "--runs", str(tmp_path)]
    small = ["orchestration.updates=1", "warm_start.steps=1", "warm_start.max_loss=10", "data.held_out.options.count=4"]
    done = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "| default | 0 | " in done.stdout


SMALL = {"steps": 4, "updates": 12, "tasks_per_update": 4, "group_size": 4, "engine_capacity": 16, "training": 40.0}


def world(sigma: float, **sizes: float) -> World:
    settings = {**SMALL, "generation": lognormal(60, sigma), "mean": 60.0, **sizes}
    return World(**settings)  # type: ignore[arg-type]


def test_synchronous_training_takes_the_slowest_trajectory_and_then_the_update() -> None:
    """Everything constant: 60 s, 40 s and 2 s, one after the other; side by side, only the first."""
    constant = world(0, publication=2.0)
    expected = {"trajectories/s": 16 / 102, "engine idle": 42 / 102, "learner idle": 60 / 102, "staleness max": 0}
    sync = figures(constant, simulate(constant, StalenessSettings(0)))
    assert {name: sync[name] for name in expected} == pytest.approx(expected)
    beside = figures(constant, simulate(constant, StalenessSettings(2)))
    assert beside["trajectories/s"] == pytest.approx(16 / 60) and beside["of bound"] == pytest.approx(1)
    assert beside["engine idle"] == pytest.approx(0) and beside["dropped"] == 0


@pytest.mark.parametrize("policy", ["mask_steps", "wait", "drop_group"])
@pytest.mark.parametrize("staleness", [1, 3])
def test_no_step_is_trained_beyond_the_bound_whatever_becomes_of_it(staleness: int, policy: str) -> None:
    simulated = world(1.5)
    seen = simulate(simulated, StalenessSettings(staleness, policy))  # type: ignore[arg-type]
    result = figures(simulated, seen)
    assert max(seen.staleness) == staleness
    assert (result["dropped"] == 0) == (policy == "wait")
    assert len(seen.trained) == simulated.updates and result["of bound"] <= 1.05
    trained = sum(kept for _, kept, _ in seen.fates(simulated.steps))
    assert trained == sum(sum(update.values()) for update in seen.trained) == len(seen.staleness)
    if policy == "drop_group":
        assert result["s dropped"] > result["s trained"]  # the length bias


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_part_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("every part was skipped: torch") and "no CUDA device" in printed


@pytest.mark.slow
def test_parts_run_on_a_cpu_and_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row["kernel"] for row in gpu_check.PARTS["kernels"]("cpu")} == {"tiles"}
    monkeypatch.setattr(
        sys, "argv", ["gpu_check", "--device", "cpu", "--output", str(tmp_path / "parts.json"), "engine", "vllm"]
    )
    assert gpu_check.main() == 0
    parts = json.loads((tmp_path / "parts.json").read_text())["parts"]
    assert [*parts["engine"], *parts["vllm"]] == ["rows", "skipped"]
