"""A run whose learner is two ranks and whose engines are two vLLM servers, all of them on a cluster."""

import json
import os
import time
from pathlib import Path
from uuid import uuid4

import pytest

from tests.engines.vllm.conftest import SIZES, python_with_vllm
from tests.orchestration.runs import check_finished, query, start, updates
from tests.placement.drivers import of_test, start_driver, wait_for_updates
from tests.worlds import Quiet

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]


def settings() -> list[str]:
    return [
        *(f"model.build.{name}={value}" for name, value in {**SIZES, "num_hidden_layers": 2}.items()),
        "placement.kind=ray",
        "placement.learner.ranks=2",
        "placement.engines.count=2",
        "placement.rollout.workers=2",
        "training.threads=1",
        "engine.kind=vllm",
        "engine.batch=16",
        f"engine.vllm.python={python_with_vllm()}",
    ]


def shared_memory() -> set[str]:
    return {
        name for name in os.listdir("/dev/shm") if name.startswith(("plasma", "ray", "treadle", "psm_", "sem.", "vllm"))
    }


def test_nothing_is_left_of_servers_whose_run_is_killed(tmp_path: Path) -> None:
    before, mark, run = shared_memory(), uuid4().hex, tmp_path / "run"
    driver = start_driver(run, mark, *settings(), "orchestration.updates=1000")
    wait_for_updates(driver, run, 2)
    assert len(of_test(mark)) > 8 and shared_memory() - before
    driver.kill()
    driver.wait()
    time.sleep(10)
    assert of_test(mark) == []
    assert not shared_memory() - before


def test_two_servers_are_fed_from_two_ranks(tmp_path: Path) -> None:
    run, progress = tmp_path / "run", Quiet()
    start(run, *settings(), "orchestration.updates=3", progress=progress)
    check_finished(run)  # what was sampled has the learner's log-probabilities to 1e-4
    versions = query(run, "SELECT DISTINCT oldest_version FROM trajectories ORDER BY 1")
    assert [row["oldest_version"] for row in versions] == [0, 1, 2, 3]
    for number in range(2):
        said = (run / f"vllm-{number}.log").read_text()
        assert said.count("POST /update_weights") >= 3 and "POST /inference/v1/generate" in said
    print(json.dumps([row["logprob_gap_max"] for row in updates(run)]), *progress.lines, sep="\n")
    assert all(row["logprob_gap_max"] <= 1e-4 for row in updates(run))
