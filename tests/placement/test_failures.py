"""What dies in the middle of a run: an engine, and it goes on; a learner rank, and it goes on from a checkpoint."""

import threading
from pathlib import Path

import pytest

from tests.orchestration.runs import check_finished, start, updates
from tests.placement.conftest import actors
from tests.until import wait_until
from tests.worlds import Quiet, tiny
from treadle.orchestration.setup.inputs import load_inputs
from treadle.orchestration.train import train_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]

SETTINGS = (
    "placement.kind=ray",
    "placement.learner.ranks=2",
    "placement.engines.count=2",
    "training.threads=1",
    "evaluation.every=0",
    "orchestration.updates=8",
    "data.train.options.seconds=0.1",  # each reply; leaves time to be killed in
)


def kill_later(run: Path, title: str, update: int) -> threading.Thread:
    """Kill an actor's process once so many updates are made."""

    def work() -> None:
        wait_until(lambda: (run / "metrics.jsonl").is_file() and len(updates(run)) >= update)
        actors(title)[0].kill()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def play(run: Path, title: str, *more: str) -> tuple[str, list[str]]:
    config, progress = tiny(*SETTINGS, *more), Quiet()
    thread = kill_later(run, title, 3)
    summary = train_run(config, load_inputs(config), run, progress)
    thread.join(0)
    assert not thread.is_alive()
    check_finished(run)
    return str(summary["weights_sha256"]), progress.lines


def test_a_run_goes_on_from_the_last_checkpoint_when_a_rank_is_killed(tmp_path: Path) -> None:
    digest, lines = play(tmp_path / "killed", "RankActor")
    [line] = [line for line in lines if "going on from the checkpoint" in line]
    assert line.startswith("learner rank ") and line.endswith(("of update 2", "of update 4")), line
    assert digest == start(tmp_path / "straight", *SETTINGS)["weights_sha256"]


@pytest.mark.parametrize("more", [(), ("placement.rollout.workers=2", "orchestration.max_staleness=1")])
def test_a_run_goes_on_when_an_engine_is_killed(tmp_path: Path, more: tuple[str, ...]) -> None:
    _, lines = play(tmp_path / "killed", "EngineActor", *more)
    assert any(line.startswith("engine ") and "; starting it again" in line for line in lines), lines
    assert not any("going on from the checkpoint" in line for line in lines)
