"""Runs that are interrupted or killed, in processes of their own, end with the weights of a run that was not."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.test_engine_restart import children as children
from tests.engines.test_engine_restart import staged
from tests.forks import ForkedProcess, run
from tests.runs import check_finished, put_config, put_data, query, resume, start, updates
from tests.until import CEILING, wait_until
from tests.worlds import ROOT, Quiet, tiny
from treadle.core.config import dump_yaml
from treadle.plan.config import config_of
from treadle.plan.device import settled
from treadle.record.ledger_reader import SCHEMA_VERSION
from treadle.record.run_directory import RunDirectory

SLOWLY = "data.train.options.seconds=0.03"  # each reply; leaves time to be killed in


@contextmanager
def training(folder: Path, *arguments: str, recipe: str = "", name: str = "run") -> Iterator["subprocess.Popen[str]"]:
    """`treadle train` in a process of its own, of the recipe in the folder unless one is named; killed on leaving."""
    where = ("--runs", str(folder / "runs"), "--name", name)
    with ForkedProcess(
        [sys.executable, "-m", "treadle.cli.main", "train", recipe or str(folder / "tiny.yaml"), *arguments, *where],
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


def wait_for_update(
    folder: Path, number: int, process: "subprocess.Popen[str]", name: str = "run", seconds: float = CEILING
) -> None:
    metrics = folder / "runs" / name / "metrics.jsonl"
    assert seconds <= CEILING  # which is waited for

    def is_made() -> bool:
        over = process.poll() is not None
        made = metrics.is_file() and metrics.read_text().count('"kind": "update"') >= number
        assert made or not over, process.communicate()[0]
        return made

    wait_until(is_made)


def read_until(process: "subprocess.Popen[str]", pattern: str) -> None:
    """Read its output until there is a match."""
    assert process.stdout is not None
    said = ""
    while not re.search(pattern, said):
        said += (line := process.stdout.readline())
        assert line, said


def strike(process: "subprocess.Popen[str]") -> None:
    """kill -9, unless it has ended; none of its children outlives it for long."""
    ids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), output
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in ids))


def expect(process: "subprocess.Popen[str]", status: int) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def write_recipe(folder: Path, *overrides: str) -> str:
    """Write the recipe; returns the weights' SHA-256 of an uninterrupted run of it, made in this process."""
    (folder / "tiny.yaml").write_text(dump_yaml(tiny(SLOWLY, *overrides)))
    return str(start(folder / "straight", SLOWLY, *overrides)["weights_sha256"])


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_with_130_and_resume_finishes_the_same(tmp_path: Path) -> None:
    expected = write_recipe(tmp_path, "orchestration.updates=8")
    run = tmp_path / "runs" / "run"
    with training(tmp_path) as process:
        wait_for_update(tmp_path, 1, process)
        process.send_signal(signal.SIGINT)
        output = expect(process, 130)
    assert "stopping: finishing this update" in output
    assert "/run --resume" in output
    done = len(updates(run))
    assert 1 <= done < 8
    assert (run / "checkpoints" / f"step-{done:06d}" / "model.safetensors").is_file()
    assert not (run / "summary.json").exists()
    with training(tmp_path, "--resume") as process:
        output = expect(process, 0)
    assert f"after {done} of 8 updates" in output
    assert json.loads((run / "summary.json").read_text())["weights_sha256"] == expected
    check_finished(run)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [2, 4])
def test_another_ctrl_c_in_the_first_evaluation_is_one_plain_line(signals: int, tmp_path: Path) -> None:
    options = ("orchestration.updates=4", "data.held_out.options.seconds=0.5")
    expected = write_recipe(tmp_path, *options)
    run = tmp_path / "runs" / "run"
    with training(tmp_path) as process:
        read_until(process, "run directory: ")
        wait_until(lambda: (run / "status.json").is_file() and '"evaluation"' in (run / "status.json").read_text())
        process.send_signal(signal.SIGINT)
        read_until(process, "stopping: ")
        for _ in range(signals - 1):
            process.send_signal(signal.SIGINT)
        output = expect(process, 130)
    assert re.fullmatch("(interrupted; .*|stopped after .*)?\n?", output)  # it may come before or after the checkpoint
    with training(tmp_path, *(["--resume"] if any(run.glob("checkpoints/*")) else [])) as process:
        expect(process, 0)
    assert json.loads((run / "summary.json").read_text())["weights_sha256"] == expected


# Asynchronous: no two runs are the same, but in each every step has one end

ASYNCHRONOUS = ("orchestration.max_staleness=2", "orchestration.updates=8", SLOWLY)


@pytest.mark.quick(1)
@pytest.mark.parametrize("policy", ["mask_steps", "wait", "drop_group"])
def test_an_asynchronous_run_ends_with_nothing_undecided(policy: str, tmp_path: Path) -> None:
    start(tmp_path / "run", *ASYNCHRONOUS, f"orchestration.stale_policy={policy}")
    check_finished(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGINT, 3600), (signal.SIGTERM, 3600), (signal.SIGTERM, 0.01)])
def test_an_asynchronous_run_leaves_at_once_when_asked(number: signal.Signals, seconds: float, tmp_path: Path) -> None:
    """While it waits for a batch that would take hours, and amid updates."""
    options = (*ASYNCHRONOUS, "orchestration.updates=100" if seconds < 1 else "orchestration.updates=8")
    (tmp_path / "tiny.yaml").write_text(dump_yaml(tiny(*options, f"data.train.options.seconds={seconds}")))
    run = tmp_path / "runs" / "run"
    with training(tmp_path) as process:
        if seconds < 1:
            wait_for_update(tmp_path, 2, process)
        else:
            wait_until(lambda: (run / "checkpoints" / "step-000000").exists() or process.poll() is not None)
        process.send_signal(number)
        assert "/run --resume" in expect(process, 130)
    quick = f"schema_version: {SCHEMA_VERSION}\n{dump_yaml(settled(tiny(*options)))}"  # its environment is quick now
    put_config(run, quick)
    put_data(run, tiny(*options))
    resume(run)
    check_finished(run)


WHOLE_INTERVAL = "write=:24,record=:4,checkpoint=1,publish=:2,resume=:7,end=:5"  # from one checkpoint to the next


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        ("record=2", "orchestration.updates=6"),
        *(
            pytest.param(kills, options, marks=pytest.mark.slow)
            for kills, options in (
                ("resume=:25", "orchestration.updates=4"),
                ("resume=:12", "orchestration.updates=4 orchestration.ledger_directory=LOCAL"),
                (
                    "write=:4,record=:2,publish=1,resume=:3,end=:2",
                    "orchestration.updates=36 orchestration.max_staleness=2 orchestration.stale_policy=wait",
                ),
                (
                    "write=2,record=1,publish=1,checkpoint=1",
                    "orchestration.updates=16 orchestration.checkpoint_every=1 training.updates_per_batch=2 "
                    "engine.own_process=true",
                ),
                (
                    "write=6,record=2,publish=1,checkpoint=1",
                    "orchestration.updates=16 orchestration.checkpoint_every=1 orchestration.max_staleness=2 "
                    "orchestration.stale_policy=drop_group engine.own_process=true",
                ),
                (WHOLE_INTERVAL, "orchestration.updates=90 orchestration.ledger_directory=LOCAL"),
            )
        ),
    ],
)
def test_whatever_was_being_written_when_the_run_was_killed(kills: str, options: str, tmp_path: Path) -> None:
    """Just before each fsync and rename (shards, checkpoints) and each commit of the ledger (records, checkpoints), and
    with new weights in the engine, or staged, but the publication unfinished.
    """
    options = options.replace("LOCAL", str(tmp_path / "local"))
    words = [sys.executable, "-m", "tests.loop.killed_runs", str(tmp_path), kills, *options.split()]
    done = run(words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    if "max_staleness" in options:
        restored = re.findall(r"(\d+) finished trajectories .* are reused", (tmp_path / "said").read_text())
        assert max(map(int, restored)) > 0
        return
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["weights_sha256"] == start(tmp_path / "straight", *options.split())["weights_sha256"]


class Striking(Quiet):
    """From a certain batch on, the engine's process answers nothing any more, and then is killed."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.after = batch

    def began(self, name: str) -> None:
        if name == "rollout" and len(self.rows) == self.after:
            [pid] = children()
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()


@pytest.mark.slow
@pytest.mark.parametrize(("max_staleness", "batch"), [(0, 0), (2, 3)])
def test_a_run_goes_on_when_its_engine_was_killed(max_staleness: int, batch: int, tmp_path: Path) -> None:
    """Even in the first batch no attempt fails: another process makes the calls again."""
    path, progress = tmp_path / "run", Striking(batch)
    options = ("engine.own_process=true", "orchestration.updates=8", f"orchestration.max_staleness={max_staleness}")
    start(path, *options, progress=progress)
    check_finished(path)
    said = [line for line in progress.lines if line.startswith("the engine ended")]
    assert said == ["the engine ended with code -9 (Killed); restarting it"]
    assert not query(path, "SELECT failure_cause AS cause FROM trajectories WHERE reward IS NULL")
    graded = query(
        path,
        "SELECT count(*) AS n FROM trajectories JOIN groups USING (group_id) WHERE trained_version IS NOT NULL AND "
        "reward IS NOT NULL GROUP BY group_id",
    )
    assert {row["n"] for row in graded} == {config_of(RunDirectory.open(path)).training.group_size}
    assert not children() and not staged()
