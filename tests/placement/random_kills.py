"""`make test-cluster`: one run in which twenty processes of all kinds are killed, drawn at random. Takes many minutes.

python -m pytest tests/placement/random_kills.py
"""

import os
import random
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tests.placement.conftest import MARK, actors
from tests.runs import check_finished, updates
from tests.worlds import Quiet, tiny
from treadle.api.train import train_run
from treadle.plan.inputs import load_inputs

KILLS = int(os.environ.get("KILLS", "20"))
TITLES = ("RankActor", "EngineActor", "RolloutActor")
SETTINGS = (
    "placement.kind=ray",
    "placement.learner.ranks=2",
    "placement.engines.count=2",
    "placement.rollout.workers=2",
    "training.threads=1",
    "evaluation.every=0",
    "orchestration.checkpoint_every=1",
    f"orchestration.updates={2 * KILLS + 10}",
    "data.train.options.seconds=0.1",
)


def kill_some(run: Path, killed: list[str]) -> None:
    drawn, reached = random.Random(0), 0
    while len(killed) < KILLS:
        time.sleep(drawn.uniform(0.1, 1.0))
        if not (run / "metrics.jsonl").is_file() or len(updates(run)) <= reached:
            continue
        title = drawn.choice(TITLES)
        if found := actors(title):
            reached = len(updates(run))
            drawn.choice(found).kill()
            killed.append(title)


def test_a_run_outlasts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, uuid4().hex)
    config, progress, killed = tiny(*SETTINGS), Quiet(), list[str]()
    thread = threading.Thread(target=kill_some, args=(tmp_path / "run", killed), daemon=True)
    thread.start()
    summary = train_run(config, load_inputs(config), tmp_path / "run", progress)
    print(killed, *progress.lines, sep="\n")
    assert not summary["stopped_early"] and len(killed) == KILLS
    check_finished(tmp_path / "run")
