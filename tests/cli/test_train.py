"""`treadle train`: what it prints, and what it says where something is wrong. Nothing is ever lost."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.cli.conftest import Place, Trained
from tests.cli.test_models import PLAIN
from tests.cli.worlds import ROOT, TakesTheRunDirectory, files, finish, playing, start_treadle, treadle
from tests.fake_hub import serving_hub
from tests.runs import change_ledger, put_config, updates
from tests.worlds import tiny
from treadle.cli.train import before_after_table, one_line, print_result
from treadle.core.registry import names
from treadle.packing.layout import Packing
from treadle.plan.config import config_of
from treadle.record.run_directory import RunDirectory

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
    print_result(json.loads((run / "summary.json").read_text()), run, config_of(RunDirectory.open(run)))
    assert re.findall(r"treadle show \S+ (e\S+)", capsys.readouterr().out) == ["e000000-0003.0", "e000004-0003.0"]


@pytest.mark.parametrize(
    ("evaluated", "columns"),
    [
        ([(0, 1.0), (0, 0.0), (8, 1.0), (8, 0.0)], ["before, T=1", "after, T=1", "before, greedy", "after, greedy"]),
        ([(0, 1.0), (0, 0.0), (8, 1.0)], ["before, T=1", "after, T=1", "before, greedy"]),  # greedy switched off
        ([(0, 1.0), (4, 1.0), (4, 0.0), (8, 1.0), (8, 0.0)], ["before, T=1", "after, T=1", "after, greedy"]),  # and on
        ([(0, 1.0), (0, 0.0), (4, 1.0), (4, 0.0), (8, 1.0)], ["before, T=1", "after, T=1", "before, greedy"]),
        ([(0, 1.0), (8, 0.5)], ["before, T=1", "after, T=0.5"]),  # another temperature
        ([(0, 1.0)], ["before, T=1"]),
        ([(8, 1.0)], ["after, T=1"]),
    ],
)
def test_before_is_before_and_after_is_after(evaluated: list[tuple[int, float]], columns: list[str]) -> None:
    figures = {"tasks": 4, "success": 0.5, "failed": 0, "by": {}}
    results = [{"update": update, "temperature": temperature, **figures} for update, temperature in evaluated]
    table = before_after_table(results, tiny())
    assert [column.header for column in table.rich.columns[1:]] == columns


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


def test_an_engine_that_does_not_start_leaves_its_log(place: Place, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo vllm 0 False && exit\necho out of luck; exit 3\n')
    python.chmod(0o755)
    done = place.train("engine.kind=vllm", f"engine.options.python={python}")
    assert done.status == 1 and "out of luck" in done.err
    [log] = (place.runs / "new").glob("*.log")
    assert str(log) in done.err and "out of luck" in log.read_text()
    assert place.train().status == 0  # the name is free


@pytest.mark.parametrize("wrong", ["seed=x", "rollout.max_input_tokens=4"])
def test_a_run_without_a_name_that_cannot_start_leaves_nothing_either(wrong: str, place: Place) -> None:
    assert treadle("train", place.recipe, "--runs", place.runs, wrong).status == 2
    assert not place.runs.exists() or not any(place.runs.iterdir())


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


def test_a_run_directory_taken_in_the_meantime_is_left_alone(place: Place) -> None:
    TakesTheRunDirectory.path = place.runs / "new"
    done = place.train(*playing("TakesTheRunDirectory"))
    TakesTheRunDirectory.lock.close()
    assert done.status == 1 and "another process is training in" in done.error
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
    done = place.train("--resume-from", "1")
    assert done.status == 1 and "has no checkpoint 'step-000001'; it has step-000004, step-000006" in done.error


def test_ctrl_c_saves_a_checkpoint_and_resume_goes_on(stopped: Trained, tmp_path: Path) -> None:
    assert stopped.done.status == 130
    command = f"treadle train {stopped.path} --resume"
    assert f"stopped after 3 updates, with a checkpoint; continue with {command}\n" in stopped.done.out
    shutil.copytree(stopped.path, tmp_path / "runs" / "run")
    done = treadle("train", tmp_path / "runs" / "run", "--resume")  # without its recipe
    assert done.status == 0, done.err
    assert "after 3 of 6 updates" in done.out
    assert json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["updates"] == 6


def test_resume_from_a_checkpoint_that_does_not_fit(stopped: Trained, place: Place) -> None:
    run = place.runs / "new"
    shutil.copytree(stopped.path, run)
    put_config(run, (run / "config.yaml").read_text().replace("hidden_size: 32", "hidden_size: 48"))
    before = files(run)
    done = place.train("--resume")
    assert done.status == 1 and "step-000003" in done.error
    assert "holds another model: hidden_size is 32 there" in done.error
    assert files(run) == before


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_ctrl_c_during_the_warm_start_leaves_nothing(place: Place) -> None:
    override = "warm_start.demonstrations=tests.cli.worlds:interrupted_demonstration"
    done = place.train(override, "warm_start.options={}")
    assert (done.status, done.err) == (130, "")
    assert "interrupted; nothing was trained yet\n" in done.out
    assert not (place.runs / "new").exists()


def test_a_run_killed_in_its_warm_start_is_begun_anew(place: Place) -> None:
    process = start_treadle("train", place.recipe, "--runs", place.runs, "--name", "new", "warm_start.steps=1000000")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("run directory: ")
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert (place.runs / "new" / "config.yaml").is_file()
    done = place.train("--resume", "warm_start.steps=10", "orchestration.updates=1")
    assert done.status == 0, done.err
    assert "has no checkpoint yet: it starts over" in done.out


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_earlier_checkpoint_goes_on(place: Place) -> None:
    """RLIMIT_FSIZE takes the weights of update 0, but not the larger optimizer of update 1."""
    words = ["train", place.recipe, "--runs", place.runs, "--name", "new", "data.held_out=null", "data.table_by=null"]
    words += ["model.build.hidden_size=128", "warm_start=null", "orchestration.checkpoint_every=1"]
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (800_000,) * 2)"
    done = finish(start_treadle(*words, before=limit))
    assert done.status == 1, done.out
    assert re.search(r"could not write \S*step-000001.*File too large", done.error)
    assert "free disk space" in done.error and "--resume" in done.error
    checkpoints = place.runs / "new" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000"]
    resumed = place.train("--resume")
    assert resumed.status == 0, resumed.err
    report = json.loads(treadle("report", place.runs / "new", "--json").out)
    states = {(row["state"], row["reason"]): row["count"] for row in report["steps"]}
    assert states == {("trained", None): 64, ("dropped", "resampled"): 16}


def test_it_shows_prompt_memory_and_checks_and_leaves_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    before = files(tmp_path)
    done = treadle("train", place.recipe, "--dry-run")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    checks = [line.split()[0] for line in lines[:10]]
    assert checks == ["settings", "data", "device", "tokenizer", "model", "engine", "first", "warm", "memory", "disk"]
    assert lines[11].startswith("first prompt, task ") and lines[11].endswith(" tokens")
    assert lines[12] == "<|im_start|>user" and "<|im_start|>assistant" in lines
    assert any(line.startswith("AdamW's moments") for line in lines)
    assert files(tmp_path) == before and not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()


def test_what_is_missing_makes_the_status_1_and_has_a_line(place: Place) -> None:
    done = treadle("train", place.recipe, "--dry-run", "callbacks=[typo]", "data.held_out.source=nowhere.jsonl")
    assert done.status == 1
    missing = [line for line in done.out.splitlines() if line.split()[1:2] == ["missing"]]
    assert [line.split()[0] for line in missing] == ["data", "callbacks"]
    assert done.out.splitlines()[-1] == "missing: data, callbacks"


NAMED = {
    "seeds": ["seeds=3"],
    "group_size": ["training.group_size=0"],
    "updates_per_batch": ["training.updates_per_batch=99"],
    "no_world:World": ["environment=no_world:World"],
    "no_agent:solve": ["environment=null", "agent=no_agent:solve"],
    "no_rewards:reward": ["environment=null", "reward=no_rewards:reward"],
    "typo": ["callbacks=[typo]"],
    "herms": ["rollout.reply_parser=herms"],
    "few.jsonl": ["data.train.source=few.jsonl", "data.train.options={}"],
    "others.jsonl": ["data.held_out.source=others.jsonl", "data.held_out.options={}"],
    "/no/tokenizer": ["model.tokenizer=/no/tokenizer"],
    "/no.jinja": ["model.chat_template=/no.jinja"],
    "/no/model": ["model.path=/no/model", "model.build=null"],
    "/no/reference": ["models.first.path=/no/reference", "algorithm.kl={coef: 0.1, model: first}"],
    "/no/teacher": ["models.big.path=/no/teacher", "algorithm.distillation.teacher=big"],
    "/no/python": ["engine.kind=vllm", "engine.options.python=/no/python"],
    "slurm": ["placement.kind=slurm"],
    "demonstrations.jsonl": ["warm_start={demonstrations: demonstrations.jsonl}"],
}
"""What the error names -> settings. Nothing of it needs torch or transformers."""


def test_what_needs_no_torch_is_said_before_it_is_imported(place: Place) -> None:
    code = """
import contextlib, io, json, sys
from importlib.abc import MetaPathFinder

class Imported(BaseException):
    pass

class Refusing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("torch", "transformers"):
            raise Imported

sys.meta_path.insert(0, Refusing())
from treadle.cli.main import main
for words in json.load(open(sys.argv[1])):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main(words)
        except Imported:
            said.write("-- imported")
    print(json.dumps(said.getvalue()))
"""
    hows = (["--dry-run"], ["--name", "new"])
    commands = [["train", str(place.recipe), *settings, *how] for settings in NAMED.values() for how in hows]
    file = place.path / "commands.json"
    file.write_text(json.dumps(commands))
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=False)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(commands), done.stderr
    for name, dry, text in zip(NAMED, said[::2], said[1::2], strict=True):
        assert name in dry.partition("-- imported")[0], dry
        assert name in text and "-- imported" not in text, text


@pytest.mark.slow
def test_nothing_is_downloaded(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub has the model; without --dry-run it would be fetched."""
    folder = tmp_path / "served"
    shutil.copytree(ROOT / "src" / "treadle" / "recipes" / "tokenizer", folder)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with serving_hub("org/model", folder) as (endpoint, asked):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        words = ("train", place.recipe, "--dry-run", "model.tokenizer=org/model")
        # not forked: the hub's client reads these variables when it is imported
        command = [sys.executable, "-m", "treadle.cli.main", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert asked == []
    assert done.returncode == 1
    assert "treadle models get org/model" in done.stdout
    assert "HF_HUB_OFFLINE" not in os.environ


def test_it_writes_a_model_that_transformers_loads_and_says_how_to_go_on(place: Place) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = place.path / "some models" / "warm"
    done = treadle("sft", place.recipe, "--out", out, "warm_start.steps=10", "seed=5", "data.table_by=b")
    assert (done.status, done.err) == (0, "")
    assert re.search(r"^loss \d\.\d{3} nats a token \(10 steps in \d+ s\)$", done.out, re.MULTILINE)
    assert sorted(path.name for path in out.iterdir()) == PLAIN
    assert [path.name for path in out.parent.iterdir()] == ["warm"]
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(out).chat_template is not None
    commands = dict(re.findall(r"^(evaluate it|train from it): treadle (.*)$", done.out, re.MULTILINE))
    assert all("seed=5 data.table_by=b" in command and "steps" not in command for command in commands.values())
    assert treadle(*shlex.split(commands["evaluate it"])).status == 0
    again = [*shlex.split(commands["train from it"]), "orchestration.updates=1", "--runs", place.runs, "--name", "next"]
    trained = treadle(*again)
    assert trained.status == 0, trained.err
    assert "warm start" not in trained.out


def test_not_having_learned_is_an_error_and_nothing_is_written(place: Place) -> None:
    done = treadle("sft", place.recipe, "warm_start.max_loss=0.001", "warm_start.steps=3", "--out", place.path / "m")
    assert done.status == 1 and "the warm start did not learn its demonstrations" in done.error
    assert not (place.path / "m").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(place: Place) -> None:
    process = start_treadle("sft", place.recipe, "warm_start.steps=1000000", "--out", place.path / "m")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("warm start 1/1000000 loss ")
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.status, done.error) == (130, "interrupted")
    assert [path.name for path in place.path.iterdir()] == ["tiny.yaml"]


PAIRS = list(product(names("advantages"), names("policy_losses")))


@pytest.mark.quick(2)
@pytest.mark.parametrize(("number", "advantage", "loss"), [(n, *pair) for n, pair in enumerate(PAIRS)])
def test_it_trains_two_updates(number: int, advantage: str, loss: str, place: Place) -> None:
    packing = list(Packing)[number % len(Packing)]
    done = place.train(
        *(f"algorithm.advantage={advantage}", f"algorithm.policy_loss={loss}", f"training.packing={packing}"),
        *("training.updates_per_batch=2", "orchestration.updates=2", "data.held_out=null", "data.table_by=null"),
    )
    assert done.status == 0, done.err
    rows = updates(place.runs / "new")
    assert [row["update"] for row in rows] == [1, 2]
    assert all(row["trainable_tokens"] > 0 and row["loss"] is not None for row in rows)
    assert any(row["gradient_norm"] > 0 for row in rows)


def test_a_row_of_the_dry_run_is_one_line_of_an_error_with_code() -> None:
    assert one_line("write\n    def agent(task, client):\n        ...") == "write def agent(task, client): ..."
