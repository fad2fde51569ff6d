"""`treadle train`: what it prints, and what it says where something is wrong. Nothing is ever lost."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Place, Trained
from tests.cli.worlds import TakesTheRunDirectory, files, finish, playing, start_treadle, treadle
from tests.orchestration.runs import change_ledger, put_config
from treadle.cli.train import print_result
from treadle.orchestration.store.run_directory import RunDirectory

# --- a run that goes well ---------------------------------------------------------------------------------------------


def test_a_finished_run_ends_with_its_results_and_where_they_are(finished: Trained) -> None:
    out, summary = finished.done.out, json.loads((finished.path / "summary.json").read_text())
    assert "held-out success, 12 tasks" in out
    assert all(column in out for column in ("before, T=1", "after, T=1", "before, greedy", "after, greedy"))
    [row] = re.findall(r"^all +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", out, re.MULTILINE)
    names = ("before", "after")
    figures = [summary[f"held_out_{kind}_{name}"] for kind in ("success", "greedy") for name in names]
    assert list(row) == [f"{figure:.3f}" for figure in figures]
    for when, identifier in (("before", "e000000-"), ("after", "e000004-")):
        assert re.search(rf"{when} training   treadle show \S+/run {identifier}\d+\.0\n<\|im_start\|>user\n", out)
    assert len(re.findall(r"^-> reward [01], done, 1 step$", out, re.MULTILINE)) == 2
    for line in (str(finished.path), f"{finished.path}/curve.png", f"{finished.path}/summary.json"):
        assert re.search(rf"^\w+ +{re.escape(line)}$", out, re.MULTILINE)
    assert f"sha256 {summary['weights_sha256']}" in out


def test_the_two_trajectories_are_a_task_that_was_learned(
    finished: Trained, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the first task of all, nor one without a reward, which SQL would sort first."""
    run = place.runs / "run"
    shutil.copytree(finished.path, run)
    change_ledger(
        run,
        "UPDATE trajectories SET reward = NULL WHERE trajectory_id LIKE 'e%'",
        "UPDATE trajectories SET reward = 0 WHERE trajectory_id GLOB 'e000000-000[123].0'",
        "UPDATE trajectories SET reward = 0 WHERE trajectory_id = 'e000004-0001.0'",
        "UPDATE trajectories SET reward = 1 WHERE trajectory_id = 'e000004-0003.0'",
        "UPDATE trajectories SET reward = 1 WHERE trajectory_id GLOB 'e00000[04]-0002.0'",
    )
    print_result(json.loads((run / "summary.json").read_text()), run, RunDirectory.open(run).config())
    assert re.findall(r"treadle show \S+ (e\S+)", capsys.readouterr().out) == ["e000000-0003.0", "e000004-0003.0"]


def test_without_a_terminal_there_are_plain_lines(finished: Trained) -> None:
    assert "\x1b" not in finished.done.out and "\r" not in finished.done.out
    assert finished.done.err == ""
    assert [line for line in finished.done.out.splitlines() if line != line.rstrip()] == []
    assert "update 4/4  reward" in finished.done.out


def test_overrides_may_stand_behind_an_option(place: Place) -> None:
    done = treadle("train", place.recipe, "--runs", place.runs, "--name", "x", "seed=-1")
    assert (done.status, done.error) == (2, "error: seed=-1: got -1, expected greater than or equal to 0")


@pytest.mark.slow
def test_two_starts_in_the_same_second_are_two_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form, *_: "20260102-030405")
    words = ("train", place.recipe, "--runs", place.runs, "orchestration.updates=1")
    assert [treadle(*words).status for _ in range(2)] == [0, 0]
    name = "tiny-seed0-20260102-030405"
    assert sorted(path.name for path in place.runs.iterdir()) == [name, f"{name}-2"]


# --- wrong input: one line, status 2, no run directory ----------------------------------------------------------------

WRONG = {
    "unknown environment": (playing("Nowhere"), "has no 'Nowhere'"),
    "unknown model field": (["model.build.hidden_sise=3"], "qwen3 knows no ['hidden_sise']"),
    "prompt too long": (["rollout.max_input_tokens=4"], "tokens, rollout.max_input_tokens is 4; raise it"),
    "context too short": (["model.build.max_position_embeddings=32"], "exceeds the model's context of 32"),
    "reset raises": (playing("FailsInReset"), "environment: reset raised ConnectionError: no backend on port 1"),
    "no step": (playing("WithoutStep"), "step is missing; write 'def step(self, text)', async or not"),
}


@pytest.mark.parametrize(("overrides", "message"), WRONG.values(), ids=WRONG)
def test_wrong_input_is_one_line_and_leaves_nothing(overrides: list[str], message: str, place: Place) -> None:
    done = place.train(*overrides)
    assert done.status == 2
    assert done.error.startswith("error: ") and message in done.error
    assert not (place.runs / "new").exists()


@pytest.mark.parametrize("wrong", ["seed=x", "rollout.max_input_tokens=4"])
def test_a_run_without_a_name_that_cannot_start_leaves_nothing_either(wrong: str, place: Place) -> None:
    assert treadle("train", place.recipe, "--runs", place.runs, wrong).status == 2
    assert not place.runs.exists() or not any(place.runs.iterdir())


def test_an_empty_dataset(place: Place) -> None:
    empty = place.path / "empty.jsonl"
    empty.write_text("")
    done = place.train(f"data.train.source={empty}", "data.train.options={}")
    assert (done.status, done.out) == (2, "")
    assert done.error.startswith(f"error: {empty} has no tasks")


# --- environments that fail while the run goes on ---------------------------------------------------------------------


def test_an_environment_that_raises_in_step_stops_the_run_and_is_named(place: Place) -> None:
    done = place.train(*playing("FailsInStep"))
    assert done.status == 1
    assert " of 16 trajectories of update 1 failed" in done.error
    assert "environment: step raised ZeroDivisionError: a bug in step" in done.error
    report = json.loads(treadle("report", place.runs / "new", "--json").out)
    assert [(row["state"], row["reason"], row["count"]) for row in report["steps"]] == [("dropped", "failed", 16)]
    assert report["latest_checkpoint"] == "step-000000" and report["state"] == "stopped"


def test_an_environment_that_raises_in_close_is_a_warning(place: Place) -> None:
    done = place.train(*playing("FailsInClose"), "orchestration.updates=1")
    assert (done.status, done.err) == (0, "")
    warnings = [line for line in done.out.splitlines() if "close raised OSError: the socket was gone" in line]
    assert len(warnings) == 1 and "trajectory g000000.0: " in warnings[0]
    assert "warning 16x, as g000000.0: close raised OSError" in treadle("report", place.runs / "new").out


# --- run directories and resuming -------------------------------------------------------------------------------------


def test_a_run_directory_in_use_is_left_alone(finished: Trained) -> None:
    before = files(finished.path)
    done = finished.place.train(name="run")
    assert done.status == 1
    assert "already in use; continue it with --resume or choose another --name" in done.error
    assert files(finished.path) == before


def test_a_run_directory_taken_in_the_meantime_is_left_alone(place: Place) -> None:
    TakesTheRunDirectory.path = place.runs / "new"
    done = place.train(*playing("TakesTheRunDirectory"))
    TakesTheRunDirectory.lock.close()
    assert done.status == 1 and "already in use" in done.error
    assert sorted(files(place.runs / "new")) == ["config.yaml", "lock"]


def test_resume_of_a_finished_run(finished: Trained) -> None:
    before = files(finished.path)
    done = finished.place.train("--resume", name="run")
    assert done.status == 1 and "is finished; nothing to resume" in done.error
    assert files(finished.path) == before


def test_resume_refuses_what_would_make_it_another_run(stopped: Trained) -> None:
    before = files(stopped.path)
    done = stopped.place.train("--resume", "seed=3", name="run")
    assert done.status == 2 and "seed is 3, the run was started with 0: it keys every draw" in done.error
    done = stopped.place.train("--resume", "orchestration.updates=2", name="run")
    assert done.status == 2 and "the checkpoint has 3 updates; give at least as many" in done.error
    done = stopped.place.train("--resume", "orchestration.update=9", name="run")
    assert done.status == 2 and "did you mean 'orchestration.updates'?" in done.error
    assert files(stopped.path) == before


def test_a_finished_run_is_given_more_updates_and_taken_back(finished: Trained, place: Place) -> None:
    run = place.runs / "new"
    shutil.copytree(finished.path, run)
    done = place.train("--resume", "orchestration.updates=6", "evaluation.greedy_too=false")
    assert done.status == 0, done.err
    assert "changed: evaluation.greedy_too true -> false\nchanged: orchestration.updates 4 -> 6\n" in done.out
    assert "updates: 4" in (run / "config-1.yaml").read_text()
    longer = json.loads((run / "summary.json").read_text())
    assert longer["updates"] == 6
    done = place.train("--resume-from", "step-000004")
    assert done.status == 0, done.err
    assert "back from step-000006 to step-000004: 32 steps are dropped as rolled back" in done.out
    assert json.loads((run / "summary.json").read_text())["weights_sha256"] == longer["weights_sha256"]
    done = place.train("--resume-from", "step-000001")
    assert done.status == 1 and "has no checkpoint 'step-000001'; it has step-000004, step-000006" in done.error


def test_ctrl_c_saves_a_checkpoint_and_resume_goes_on(stopped: Trained, tmp_path: Path) -> None:
    assert stopped.done.status == 130
    command = f"treadle train {stopped.place.recipe} --resume --name run --runs {stopped.place.runs}"
    assert stopped.done.err == f"stopped after 3 updates; go on with: {command}\n"
    shutil.copytree(stopped.path, tmp_path / "runs" / "run")
    done = treadle("train", stopped.place.recipe, "--resume", "--name", "run", "--runs", tmp_path / "runs")
    assert done.status == 0, done.err
    assert "after 3 of 6 updates" in done.out
    assert json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["updates"] == 6


@pytest.mark.parametrize("damage", ["another model", "cut short"])
def test_resume_from_a_checkpoint_that_does_not_fit(damage: str, stopped: Trained, place: Place) -> None:
    run = place.runs / "new"
    shutil.copytree(stopped.path, run)
    weights = run / "checkpoints" / "step-000003" / "model.safetensors"
    if damage == "another model":
        config = (run / "config.yaml").read_text().replace("hidden_size: 32", "hidden_size: 48")
        put_config(run, config)
    else:
        weights.write_bytes(weights.read_bytes()[:-10])
    before = files(run)
    done = place.train("--resume")
    assert done.status == 1
    said = {
        "another model": "holds another model: hidden_size is 32 there",
        "cut short": "is damaged: model.safetensors",
    }
    assert said[damage] in done.error
    assert "step-000003" in done.error
    assert files(run) == before


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_ctrl_c_during_the_warm_start_leaves_nothing(place: Place) -> None:
    override = "warm_start.demonstrations=tests.cli.worlds:interrupted_demonstration"
    done = place.train(override, "warm_start.options={}")
    assert (done.status, done.error) == (130, "interrupted; nothing was trained yet")
    assert not (place.runs / "new").exists()


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_earlier_checkpoint_goes_on(place: Place) -> None:
    """RLIMIT_FSIZE takes the weights of update 0, but not the larger optimizer of update 1."""
    words = ["train", place.recipe, "--runs", place.runs, "--name", "new", "data.held_out=null", "data.table_by=null"]
    words += ["model.build.hidden_size=128", "warm_start=null", "orchestration.checkpoint_every=1"]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (800_000,) * 2)"
    done = finish(start_treadle(*words, before=limit))
    assert done.status == 1, done.out
    assert re.search(r"could not write \S*step-000001.*File too large", done.error)
    assert "free some space" in done.error and "--resume" in done.error
    checkpoints = place.runs / "new" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000"]
    resumed = place.train("--resume")
    assert resumed.status == 0, resumed.err
    report = json.loads(treadle("report", place.runs / "new", "--json").out)
    states = {(row["state"], row["reason"]): row["count"] for row in report["steps"]}
    assert states == {("trained", None): 64, ("dropped", "resampled"): 16}
