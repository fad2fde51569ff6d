"""Whole runs whose learner is several ranks, through the public door."""

import json
from pathlib import Path

import pytest

from tests.orchestration.runs import check_finished
from tests.orchestration.test_kill_and_resume import SLOWLY, expect, training, wait_for_update
from tests.worlds import Quiet, tiny
from treadle.core.config import dump_yaml
from treadle.orchestration.setup.inputs import load_inputs
from treadle.orchestration.train import train_run

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
SETTINGS = (
    "training.threads=1",
    "warm_start.demonstrations='tests.worlds:vowel_demonstration'",
    "warm_start.steps=2",
    "warm_start.batch_size=4",
    "algorithm.kl={coef: 0.1}",
    "evaluation.every=0",
    "engine.own_process=true",
)


def play(path: Path, *stops: tuple[int, int]) -> str:
    """Train to so many updates with so many ranks, and go on for each further pair; the digest of the weights."""
    digest = ""
    for number, (updates, ranks) in enumerate(stops):
        config = tiny(*SETTINGS, f"orchestration.updates={updates}", f"placement.learner.ranks={ranks}")
        digest = str(train_run(config, load_inputs(config), path, Quiet(), resume=number > 0)["weights_sha256"])
    check_finished(path)
    return digest


def test_a_run_on_two_ranks_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm start, KL to the reference after it, publication to another process, evaluation, checkpoint and resume."""
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "other-cache"))  # the warm start is learned again
    expected = play(tmp_path / "straight", (5, 2))
    settings = ("orchestration.updates=5", "orchestration.checkpoint_every=2", "placement.learner.ranks=2")
    (tmp_path / "tiny.yaml").write_text(dump_yaml(tiny(SLOWLY, *SETTINGS, *settings)))
    with training(tmp_path) as process:
        wait_for_update(tmp_path, 3, process)
        process.kill()
    with training(tmp_path, "--resume") as process:
        expect(process, 0)
    assert json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["weights_sha256"] == expected


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    assert play(tmp_path / "run", (1, 1), (2, 2), (3, 1))
