"""Training whose rollouts real servers sample."""

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.vllm.conftest import SIZES, Servers, python_with_vllm, started
from tests.runs import check_finished, query, start, updates
from tests.until import CEILING, wait_until
from tests.worlds import Quiet, Vowels, tiny
from treadle.api.evaluate import Subject, evaluate_model
from treadle.core.errors import ConfigError
from treadle.envs.base import EnvStep
from treadle.plan.inputs import load_held_out

pytestmark = pytest.mark.xdist_group("vllm")


def overrides(**engine: Any) -> list[str]:
    sizes = [f"model.build.{name}={value}" for name, value in {**SIZES, "num_hidden_layers": 2}.items()]
    settings = [f"engine.options.{name}={value}" for name, value in engine.items()]
    return [*sizes, "engine.kind=vllm", "orchestration.updates=2", *settings]


FILTERS = "rollout.top_k=20", "rollout.top_p=0.9", "algorithm.policy_loss=importance_sampling"


@pytest.mark.parametrize("filters", [(), FILTERS], ids=["plain", "filtered"])
def test_a_run_trains_what_a_server_samples(servers: Servers, tmp_path: Path, filters: tuple[str, ...]) -> None:
    asyncio.run(started(servers["tied"].process))
    settings = [*overrides(servers=[servers["tied"].url]), *filters]
    start(tmp_path / "run", *settings)
    check_finished(tmp_path / "run")  # what was sampled has the learner's log-probabilities to 1e-4
    assert all(
        row["logprob_gap_max"] < 1e-3 and row["ratio_max"] - row["ratio_min"] < 1e-3
        for row in updates(tmp_path / "run")
    )
    versions = query(tmp_path / "run", "SELECT DISTINCT oldest_version FROM trajectories ORDER BY 1")
    assert [row["oldest_version"] for row in versions] == [0, 1, 2]
    config = tiny(*settings)
    evaluation = evaluate_model(
        Subject(config, tmp_path / "run" / "checkpoints" / "step-000002", 2), load_held_out(config), Quiet()
    )
    assert evaluation.result.tasks == 3 and not evaluation.failures


def test_a_run_without_vllm_is_refused_before_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'/nowhere/python' is not an interpreter"):
        start(tmp_path / "run", *overrides(python="/nowhere/python"))
    assert not (tmp_path / "run").exists()


class Patient(Vowels):
    """Of late updates, it waits until a server was restarted, however long a busy machine takes."""

    late = threading.Event()
    again = threading.Event()

    async def step(self, text: str) -> EnvStep:
        while self.late.is_set() and not self.again.is_set():
            await asyncio.sleep(0.1)
        return await super().step(text)


class Watching(Quiet):
    def update(self, row: Any) -> None:
        super().update(row)
        if len(self.rows) == 20:
            Patient.late.set()


# what a run starts instead of a Python with vLLM: a relay to a server that runs the first time, and then the real one
INTERPRETER = f"""#!/bin/sh
mkdir {{taken}} 2>/dev/null && exec {sys.executable} {Path(__file__).with_name("relay.py")} {{port}} "$@"
exec {{python}} "$@"
"""


@pytest.mark.slow
def test_a_run_starts_its_own_servers_and_goes_on_when_one_dies(servers: Servers, tmp_path: Path) -> None:
    tied = servers["tied"]
    asyncio.run(started(tied.process))
    python, port = tmp_path / "python", tied.url.rpartition(":")[2]
    python.write_text(INTERPRETER.format(taken=tmp_path / "taken", port=port, python=python_with_vllm()))
    python.chmod(0o755)
    run, progress = tmp_path / "run", Watching()
    Patient.late.clear()
    Patient.again.clear()

    def kill_one() -> None:
        """While the other one serves."""
        wait_until(lambda: (run / "metrics.jsonl").is_file() and len(updates(run)) >= 1)
        end_group_of(real_log(run))
        wait_until(lambda: any(line.endswith("was restarted") for line in progress.lines))
        Patient.again.set()

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    start(
        run,
        *overrides(python=python, servers=2, transfer="collective"),
        "engine.batch=16",
        "environment=tests.engines.vllm.test_vllm_run:Patient",
        "rollout.environment_timeout=900",
        "orchestration.updates=30",
        "orchestration.max_staleness=1",
        "data.train.options.seconds=0.2",
        progress=progress,
    )
    thread.join(CEILING)
    assert Patient.again.is_set(), progress.lines
    check_finished(run)  # what was sampled has the learner's log-probabilities to 1e-4
    [lost] = [line for line in progress.lines if line.endswith("; restarting it")]
    assert lost.startswith("vLLM server http://")
    assert "POST /update_weights" in real_log(run).read_text()


def real_log(run: Path) -> Path:
    [log] = [log for log in run.glob("vllm-*.log") if "APIServer" in log.read_text()]
    return log


def end_group_of(log: Path) -> None:
    """Kill the server that writes a log, with its children."""
    for process in psutil.process_iter():
        try:
            if any(Path(file.path) == log for file in process.open_files()):
                os.killpg(os.getpgid(process.pid), signal.SIGKILL)
                return
        except (psutil.Error, ProcessLookupError):
            continue
    raise AssertionError(f"nobody writes {log}")
