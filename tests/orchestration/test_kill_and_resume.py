"""Runs that are interrupted or killed, in processes of their own, end with the weights of a run that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.orchestration.runs import check_finished, start, updates
from tests.worlds import ROOT, tiny
from treadle.core.config import dump_yaml

SLOWLY = "data.train.options.seconds=0.03"  # each reply; leaves time to be killed in


@contextmanager
def training(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """`treadle train` in a process of its own; killed on leaving."""
    where = ("--runs", str(folder / "runs"), "--name", "run")
    with subprocess.Popen(
        [sys.executable, "-m", "treadle.cli.main", "train", str(folder / "tiny.yaml"), *arguments, *where],
        cwd=ROOT,
        env={**os.environ, "TREADLE_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_update(folder: Path, number: int, process: "subprocess.Popen[str]") -> None:
    metrics = folder / "runs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not metrics.is_file() or metrics.read_text().count('"kind": "update"') < number:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def expect(process: "subprocess.Popen[str]", status: int) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == status, output
    return output


def write_recipe(folder: Path, *overrides: str) -> str:
    """Write the recipe; returns the weights' SHA-256 of an uninterrupted run of it, made in this process."""
    (folder / "tiny.yaml").write_text(dump_yaml(tiny(SLOWLY, *overrides)))
    return str(start(folder / "straight", SLOWLY, *overrides)["weights_sha256"])


def test_ctrl_c_saves_and_leaves_with_130_and_resume_finishes_the_same(tmp_path: Path) -> None:
    expected = write_recipe(tmp_path, "orchestration.updates=8")
    run = tmp_path / "runs" / "run"
    with training(tmp_path) as process:
        wait_for_update(tmp_path, 1, process)
        process.send_signal(signal.SIGINT)
        output = expect(process, 130)
    assert "stopping: finishing this update" in output
    assert "--resume --name run" in output
    done = len(updates(run))
    assert 1 <= done < 8
    assert (run / "checkpoints" / f"step-{done:06d}" / "model.safetensors").is_file()
    assert not (run / "summary.json").exists()
    with training(tmp_path, "--resume") as process:
        output = expect(process, 0)
    assert f"after {done} of 8 updates" in output
    assert json.loads((run / "summary.json").read_text())["weights_sha256"] == expected
    check_finished(run)


def kill_and_resume(folder: Path, expected: str, draws: random.Random, updates: int) -> None:
    with training(folder) as process:
        wait_for_update(folder, draws.randint(2, updates - 2), process)  # the first checkpoint is there
        time.sleep(draws.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        expect(process, -signal.SIGKILL)
    with training(folder, "--resume") as process:
        expect(process, 0)
    run = folder / "runs" / "run"
    assert json.loads((run / "summary.json").read_text())["weights_sha256"] == expected
    check_finished(run)


@pytest.mark.parametrize(
    ("seed", "per_batch"),
    [(0, 1), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_kill_9_and_resume_finishes_the_same(seed: int, per_batch: int, tmp_path: Path) -> None:
    options = ("orchestration.updates=8", f"training.updates_per_batch={per_batch}")
    kill_and_resume(tmp_path, write_recipe(tmp_path, *options), random.Random(seed), updates=8)


KILLER = """
import json, os, signal, sys
from pathlib import Path
from tests.orchestration.runs import check_finished, resume, start

folder, options, moments = Path(sys.argv[1]), sys.argv[2].split(), json.loads(sys.argv[3])
sync, replace, count = os.fsync, Path.replace, 0

def counted(call, moment):
    def wrapper(*arguments):
        global count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return wrapper

def in_child(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def train(moment):
    os.fsync, Path.replace = counted(sync, moment), counted(replace, moment)
    start(folder / str(moment), *options)
    (folder / "count").write_text(str(count))

def go_on(moment):
    (folder / f"{moment}.sha").write_text(resume(folder / str(moment))["weights_sha256"])
    check_finished(folder / str(moment))

assert in_child(lambda: train(0)) == 0
for moment in sorted({int(share * int((folder / "count").read_text())) for share in moments}):
    assert in_child(lambda: train(moment)) == -signal.SIGKILL, moment
    assert in_child(lambda: go_on(moment)) == 0, moment
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["seed=0", "training.updates_per_batch=2 orchestration.checkpoint_every=1"])
def test_whatever_was_being_written_when_the_run_was_killed(options: str, tmp_path: Path) -> None:
    """Killed just before the n-th fsync or rename, for some n after the first checkpoint."""
    draws = random.Random(options)
    moments = json.dumps([0.4 + 0.6 * draws.random() for _ in range(8)])
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), options, moments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = {file.read_text() for file in tmp_path.glob("*.sha")}
    assert found == {start(tmp_path / "straight", *options.split())["weights_sha256"]}
