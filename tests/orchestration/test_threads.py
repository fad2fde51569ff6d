"""How many threads a run computes with, and how they wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.orchestration.runs import resume, start
from tests.worlds import Quiet, tiny
from treadle.core.errors import ConfigError
from treadle.orchestration.setup.thread_count import SMALL, default_threads
from treadle.orchestration.store.run_directory import RunDirectory

WAITING = "from treadle.orchestration.setup.thread_count import wait_passively; print(wait_passively()); import os; "
WAITING += "print(os.environ.get('OMP_WAIT_POLICY'))"


@pytest.mark.parametrize(
    ("parameters", "cores", "environment", "threads"),
    [
        (SMALL - 1, 64, {}, 1),
        (SMALL, 64, {}, 64),
        (SMALL, 64, {"OMP_NUM_THREADS": "7"}, 7),
        (400_000, 2, {"OMP_NUM_THREADS": "3,1"}, 3),
        (SMALL, 2, {"OMP_NUM_THREADS": ""}, 2),
    ],
)
def test_the_default_is_a_rule_of_parameters_and_cores(
    parameters: int, cores: int, environment: dict[str, str], threads: int
) -> None:
    assert default_threads(parameters, cores, environment) == threads


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_number_of_threads_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS is '{value}'; give the number"):
        default_threads(1, 2, {"OMP_NUM_THREADS": value})


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("given", "before", "printed"),
    [
        ({}, "", "True PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "", "True ACTIVE"),
        ({"GOMP_SPINCOUNT": "1000"}, "", "True None"),
        ({}, "import torch; ", "False PASSIVE"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, "import torch; ", "True PASSIVE"),
    ],
)
def test_threads_wait_passively_unless_the_environment_says_otherwise_or_torch_is_loaded(
    given: dict[str, str], before: str, printed: str
) -> None:
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", before + WAITING], env={**inherited, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == printed.split()


def test_a_run_stores_its_threads_says_them_first_and_takes_them_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    path, said = tmp_path / "run", Quiet()
    given = ("training.threads=null", "orchestration.updates=1", "warm_start=null")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    start(path, *given, progress=said)
    assert said.lines[0] == f"run directory: {path} (2 threads)"
    assert RunDirectory.open(path).config().training.threads == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        summary = resume(path, config=tiny("training.threads=null", "orchestration.updates=2", "warm_start=null"))
    finally:
        torch.set_num_threads(threads)  # of the tests that follow
    assert summary["threads"] == 2 and RunDirectory.open(path).config().training.threads == 2
