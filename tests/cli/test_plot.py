"""`treadle plot`: what it prints, what it draws of real runs, and what it says where something is wrong."""

import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Place, Trained
from tests.cli.worlds import files, treadle
from treadle.cli.report import read_run
from treadle.orchestration.reporting.curve import group_runs, panels
from treadle.orchestration.store.run_directory import RunDirectory


@pytest.fixture
def copy(finished: Trained, tmp_path: Path) -> Path:
    """A finished run's configuration and metrics, which is all that is drawn."""
    run = tmp_path / "copy"
    run.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(finished.path / name, run)
    return run


def test_runs_over_seeds_are_one_line_and_others_have_their_own(finished: Trained, place: Place) -> None:
    for name, setting in (("other-seed", "seed=1"), ("other-rate", "training.optimizer.learning_rate=0.002")):
        assert place.train(setting, name=name).status == 0
    runs, output = [finished.path, place.runs / "other-seed", place.runs / "other-rate"], place.path / "curves.png"
    before = [files(run) for run in runs]
    done = treadle("plot", *runs, finished.path, "--output", output)  # a run that is given twice counts once
    assert done.status == 0 and done.err == ""
    assert done.out.splitlines() == [
        "training.optimizer.learning_rate=0.001: seeds 0, 1, 4 updates",
        "training.optimizer.learning_rate=0.002: seed 0, 4 updates",
        f"picture  {output}",
    ]
    assert output.read_bytes().startswith(b"\x89PNG")
    assert [files(run) for run in runs] == before

    found = panels(group_runs(map(read_run, runs)))
    reward = next(panel for panel in found if panel.title == "training reward")
    assert [curve.values.shape for curve in reward.curves] == [(2, 4), (1, 4)]
    logged = [row["reward_mean"] for row in RunDirectory(runs[2]).metrics() if row["kind"] == "update"]
    assert reward.curves[1].mean.tolist() == logged
    [evaluated, *_] = (row for row in RunDirectory(runs[0]).metrics() if row["kind"] == "evaluation")
    kinds = {f"held-out success, a {key}" for key in evaluated["by"]}
    assert {"held-out success, all tasks", *kinds} == {p.title for p in found if p.title.startswith("held-out")}


def test_the_picture_that_a_run_ends_with_is_the_same(finished: Trained, tmp_path: Path) -> None:
    assert treadle("plot", finished.path, "--output", tmp_path / "plot.png").status == 0
    assert (tmp_path / "plot.png").read_bytes() == (finished.path / "curve.png").read_bytes()


def test_a_run_that_is_not_finished(stopped: Trained, tmp_path: Path) -> None:
    done = treadle("plot", stopped.path, "--output", tmp_path / "plot.png")
    assert done.status == 0 and done.out.startswith("tiny: seed 0, 3 updates\n")


def test_a_line_ends_where_its_shortest_run_does(finished: Trained, copy: Path, tmp_path: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in lines if '"update": 4' not in line))
    done = treadle("plot", copy, finished.path, "--output", tmp_path / "plot.png")
    assert done.out.startswith("tiny: seeds 0, 0, 3 updates, where the shortest run ends (the longest has 4)\n")


def test_a_run_without_updates(copy: Path, finished: Trained, tmp_path: Path) -> None:
    (copy / "metrics.jsonl").unlink()
    done = treadle("plot", finished.path, copy, "--output", tmp_path / "plot.png")
    problem = "has no updates yet; plot it after its first update, or leave it out"
    assert (done.status, done.error) == (1, f"error: run '{copy}' {problem}")
    assert not (tmp_path / "plot.png").exists()


def test_a_damaged_line_is_named_and_left_out(copy: Path, tmp_path: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    [broken] = [n for n, line in enumerate(lines) if '"kind": "update", "update": 2' in line]
    lines[broken] = lines[broken].replace("update", "upd", 1)
    (copy / "metrics.jsonl").write_text("".join(lines))
    done = treadle("plot", copy, "--output", tmp_path / "plot.png")
    problem = f"metrics.jsonl cannot be read in line {broken + 1} and has no line of update 2"
    assert (done.status, done.error) == (0, f"warning: run '{copy}': {problem}; left out of the picture")
    [curve] = panels(group_runs([read_run(copy)]))[0].curves
    assert curve.updates == (1, 3, 4)


def test_metrics_that_cannot_be_read(copy: Path, tmp_path: Path) -> None:
    (copy / "metrics.jsonl").write_bytes(b"\xff\x00 nothing\n\n[1]\n{}\n")
    done = treadle("plot", copy, "--output", tmp_path / "plot.png")
    problem = "metrics.jsonl cannot be read in line 1, 2, 3, 4; restore it, or leave the run out"
    assert (done.status, done.error) == (1, f"error: run '{copy}': {problem}")


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("curves.jpg", "--output 'curves.jpg' must end in one of .png, .pdf, .svg"),
        ("curves", "--output 'curves' must end in one of .png, .pdf, .svg"),
        ("missing/a.png", "--output 'missing/a.png': no directory 'missing'; create it first"),
    ],
)
def test_an_output_that_cannot_be_written(output: str, problem: str) -> None:
    done = treadle("plot", "nowhere", "--output", output)
    assert (done.status, done.error) == (2, f"error: {problem}")
