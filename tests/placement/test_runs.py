"""Runs whose learner and engines are actors: the same bits twice, resumed ones, and what is left of killed ones."""

import os
import signal
import threading
from pathlib import Path
from uuid import uuid4

import pytest

from tests.loop.test_forks import FORKS
from tests.loop.test_self_play import DUEL
from tests.loop.test_starts import STARTS
from tests.placement.conftest import actors, of_ray, of_test, start_driver, wait_for_updates
from tests.runs import check_finished, recorded, resume, start, updates
from tests.until import CEILING, wait_until
from tests.worlds import Quiet, tiny
from treadle.api.train import train_run
from treadle.models.model_files import tokenizer_directory
from treadle.plan.inputs import load_inputs
from treadle.training.checkpoint import export_model
from treadle.training.make import load_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]

SETTINGS = (
    "placement.kind=ray",
    "placement.learner.ranks=2",
    "placement.engines.count=2",
    "training.threads=1",
    "evaluation.every=0",
)


def test_the_same_seed_gives_the_same_bits_wherever_it_is_played_also_when_resumed(tmp_path: Path) -> None:
    progress = Quiet()
    workers = (*SETTINGS, "placement.rollout.workers=2")
    whole = start(tmp_path / "whole", *workers, "orchestration.updates=3", progress=progress)
    check_finished(tmp_path / "whole")
    assert any("placement: 6 processes on 1 node" in line for line in progress.lines), progress.lines
    assert start(tmp_path / "part", *SETTINGS, "orchestration.updates=1")["updates"] == 1
    parted = resume(tmp_path / "part", config=tiny(*SETTINGS, "orchestration.updates=3"))
    check_finished(tmp_path / "part")
    assert parted["weights_sha256"] == whole["weights_sha256"]
    losses = [[row["loss"] for row in updates(tmp_path / name)] for name in ("whole", "part")]
    assert losses[0] == losses[1]


def test_self_play_has_the_same_bits_by_a_worker(tmp_path: Path) -> None:
    settings = (*DUEL, "orchestration.updates=2", "data.held_out=null")
    there = start(tmp_path / "there", *settings, "placement.kind=ray", "placement.rollout.workers=1")
    check_finished(tmp_path / "there")
    assert there["weights_sha256"] == start(tmp_path / "here", *settings)["weights_sha256"]


@pytest.mark.parametrize("settings", [STARTS, FORKS], ids=["starts", "forks"])
def test_replayed_steps_have_the_bits_of_one_process(settings: tuple[str, ...], tmp_path: Path) -> None:
    here = start(tmp_path / "here", *settings)
    there = start(tmp_path / "there", *settings, *SETTINGS, "placement.learner.ranks=1", "placement.rollout.workers=2")
    check_finished(tmp_path / "there")
    assert sum(row.get("starts", 0) for row in updates(tmp_path / "there")) > 0
    assert there["weights_sha256"] == here["weights_sha256"]


def test_taking_turns_changes_no_bit(tmp_path: Path) -> None:
    settings = (*SETTINGS, "orchestration.updates=2", "evaluation.every=1")
    apart = start(tmp_path / "apart", *settings)
    colocated = start(tmp_path / "colocated", *settings, "placement.colocate=true")
    check_finished(tmp_path / "colocated")
    assert colocated["weights_sha256"] == apart["weights_sha256"]


def test_adapters_have_the_bits_of_one_process_and_attempts_one_version(tmp_path: Path) -> None:
    config = tiny()
    export_model(tmp_path / "base", load_model(config.model, 0), tokenizer_directory(config.model))
    settings = (
        "model.build=null",
        "model.tokenizer=null",
        f"model.path={tmp_path / 'base'}",
        "training.lora={rank: 2}",
        "training.threads=1",
        "evaluation.every=0",
    )
    here = start(tmp_path / "here", *settings)
    there = (*settings, "placement.kind=ray", "placement.rollout.workers=2")
    taking_turns = start(tmp_path / "there", *there, "placement.colocate=true")
    check_finished(tmp_path / "there")
    assert taking_turns["weights_sha256"] == here["weights_sha256"]

    pinned = (
        *SETTINGS,
        "training.lora.pin_attempts=true",
        "orchestration.max_staleness=2",
        "orchestration.updates=20",
        "data.train.options.seconds=0.01",
    )
    start(tmp_path / "pinned", *there, *pinned)
    check_finished(tmp_path / "pinned")
    versions = [{int(v) for step in steps for v in step.policy_versions} for _, steps in recorded(tmp_path / "pinned")]
    assert max(map(len, versions)) == 1 and max(map(max, versions)) > 10


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_driver_that_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    before, mark, run = of_ray(), uuid4().hex, tmp_path / "run"
    driver = start_driver(run, mark, *SETTINGS, "orchestration.updates=1000")
    wait_for_updates(driver, run, 2)
    assert len(of_test(mark)) > 4
    if how is signal.SIGINT:
        os.killpg(driver.pid, how)  # as a terminal does: all its processes
    else:
        driver.send_signal(how)
    assert driver.wait(CEILING) == (0 if how is signal.SIGINT else -9)
    wait_until(lambda: not of_test(mark) and not of_ray() - before)
    resumed = resume(run, config=tiny(*SETTINGS, f"orchestration.updates={len(updates(run)) + 1}"))
    assert not resumed["stopped_early"]
    check_finished(run)


KILLED = (*SETTINGS, "orchestration.updates=8", "data.train.options.seconds=0.1")  # each reply: time to be killed in


def kill_later(run: Path, title: str, update: int) -> threading.Thread:
    def work() -> None:
        wait_until(lambda: (run / "metrics.jsonl").is_file() and len(updates(run)) >= update)
        actors(title)[0].kill()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def play(run: Path, title: str, *more: str) -> tuple[str, list[str]]:
    config, progress = tiny(*KILLED, *more), Quiet()
    thread = kill_later(run, title, 3)
    summary = train_run(config, load_inputs(config), run, progress)
    thread.join(0)
    assert not thread.is_alive()
    check_finished(run)
    return str(summary["weights_sha256"]), progress.lines


def test_a_run_goes_on_from_the_last_checkpoint_when_a_rank_is_killed(tmp_path: Path) -> None:
    digest, lines = play(tmp_path / "killed", "RankActor")
    [line] = [line for line in lines if "continuing from the checkpoint" in line]
    assert line.startswith("learner rank ") and line.endswith(("of update 2", "of update 4")), line
    assert digest == start(tmp_path / "straight", *KILLED)["weights_sha256"]


@pytest.mark.parametrize("more", [(), ("placement.rollout.workers=2", "orchestration.max_staleness=1")])
def test_a_run_goes_on_when_an_engine_is_killed(tmp_path: Path, more: tuple[str, ...]) -> None:
    _, lines = play(tmp_path / "killed", "EngineActor", *more)
    assert any(line.startswith("engine ") and "; restarting it" in line for line in lines), lines
    assert not any("continuing from the checkpoint" in line for line in lines)
