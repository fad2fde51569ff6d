"""What goes wrong on a rank ends all of them soon, and its own error is what is shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.forks import ForkedProcess, running
from tests.loop.test_kill_and_resume import SLOWLY, expect, training, wait_for_update
from tests.runs import check_finished
from tests.training.ranks.service import Parity
from tests.until import wait_until
from tests.worlds import Quiet, tiny
from treadle.api.train import train_run
from treadle.core.config import dump_yaml
from treadle.core.errors import RankError, TrainingStopped
from treadle.plan.inputs import load_inputs
from treadle.training.rank_processes import RankProcesses
from treadle.training.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


CALLER = """
import sys
from tests.training.ranks.service import Parity
from treadle.training.rank_processes import RankProcesses
ranks = RankProcesses(Parity, 2)
print(*ranks.call("pid"), flush=True)
ranks.call("fail", 0, sys.argv[1])
"""


def test_ranks_compute_as_their_caller_does(pair: RankProcesses) -> None:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        for wanted in ((1, True), (2, False)):
            torch.set_num_threads(wanted[0])
            torch.use_deterministic_algorithms(wanted[1])
            assert pair.call("settings") == [(*wanted, 2)] * 2
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def test_an_error_of_all_ranks_leaves_them_as_they_are(pair: RankProcesses) -> None:
    with pytest.raises(TrainingStopped, match=r"rank [01]"):
        pair.call("refuse")
    assert pair.over is None and pair.call("echo", 3) == [(3,), (3,)]


def test_a_rank_that_raises_alone_ends_all_of_them_with_its_own_error(pair: RankProcesses) -> None:
    ranks = set(pair.call("pid"))
    with pytest.raises(RankError, match=r"(?s)^rank 1 failed with ZeroDivisionError: made up.*in fail"):
        pair.call("fail", 1, "raise")
    assert not ranks & running()
    with pytest.raises(RankError, match="ZeroDivisionError"):
        pair.call("echo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ("refuse", TrainingStopped, "made up"),
        ("die", RankError, r"(?s)rank 0 ended with code -9 \(Killed\); its output ends:.*last words"),
        ("unpicklable", RankError, "rank 0 failed with .*pickle"),
    ],
)
def test_other_ways_to_fail_alone(pair: RankProcesses, how: str, error: type[Exception], match: str) -> None:
    ranks = set(pair.call("pid"))
    with pytest.raises(error, match=match):
        pair.call("fail", 0, how)
    assert pair.over is not None and not ranks & running()


@pytest.mark.slow
def test_a_collective_has_a_limit() -> None:
    before = running()
    ranks = RankProcesses(Parity, 2, limit=20)
    with pytest.raises(RankError, match=r"rank 1 failed with .*[Tt]imed out"):
        ranks.call("fail", 0, "sleep")
    ranks.close()
    assert running() <= before


def refuse(ranks: Ranks) -> Parity:
    if ranks.rank == 1:
        raise TrainingStopped("rank 1 does not begin")
    return Parity(ranks)


@pytest.mark.slow
def test_a_rank_that_does_not_begin_is_named_and_nothing_stays() -> None:
    before = running()
    with pytest.raises(TrainingStopped, match="rank 1 does not begin"):
        RankProcesses(refuse, 2)
    assert running() <= before


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleep", "outlive"])
def test_ranks_end_with_their_caller(tmp_path: Path, how: str) -> None:
    """Also while they compute, and with one that is killed: their standard input closes. No folder stays."""
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    caller = ForkedProcess([sys.executable, "-c", CALLER, how], stdout=subprocess.PIPE, text=True, env=own)
    assert caller.stdout is not None
    pids = [int(pid) for pid in caller.stdout.readline().split()]
    assert len(pids) == 2
    caller.kill()
    caller.wait()
    caller.stdout.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert list(tmp_path.glob("treadle-ranks-*")) == []


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


@pytest.mark.slow
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
