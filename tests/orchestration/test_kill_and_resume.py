"""Runs that are interrupted or killed, in processes of their own, end with the weights of a run that was not."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.orchestration.runs import check_finished, put_config, resume, start, updates
from tests.worlds import ROOT, tiny
from treadle.core.config import dump_yaml

SLOWLY = "data.train.options.seconds=0.03"  # each reply; leaves time to be killed in


@contextmanager
def training(folder: Path, *arguments: str, recipe: str = "", name: str = "run") -> Iterator["subprocess.Popen[str]"]:
    """`treadle train` in a process of its own, of the recipe in the folder unless one is named; killed on leaving."""
    where = ("--runs", str(folder / "runs"), "--name", name)
    with subprocess.Popen(
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
    folder: Path, number: int, process: "subprocess.Popen[str]", name: str = "run", seconds: float = 60
) -> None:
    metrics = folder / "runs" / name / "metrics.jsonl"
    deadline = time.monotonic() + seconds
    while not metrics.is_file() or metrics.read_text().count('"kind": "update"') < number:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_until(process: "subprocess.Popen[str]", pattern: str) -> re.Match[str]:
    """Read its output until there is a match."""
    assert process.stdout is not None
    said = ""
    while not (found := re.search(pattern, said)):
        said += (line := process.stdout.readline())
        assert line, said
    return found


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


def children(process: "subprocess.Popen[str]") -> list[Path]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [Path(f"/proc/{child}") for child in found]


def strike(process: "subprocess.Popen[str]") -> None:
    """kill -9; none of its children outlives it for long."""
    left = children(process)
    process.send_signal(signal.SIGKILL)
    expect(process, -signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(child.exists() for child in left):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def kill(folder: Path, draws: random.Random, updates: int) -> None:
    """Train until a random moment, the first checkpoint being there."""
    with training(folder) as process:
        wait_for_update(folder, draws.randint(2, updates - 2), process)
        time.sleep(draws.random() * 0.1)
        strike(process)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, ""),
        *(
            pytest.param(seed, options, marks=pytest.mark.slow)
            for seed in range(1, 11)
            for options in ("engine.own_process=true", f"training.updates_per_batch={1 + seed % 2}")
        ),
    ],
)
def test_kill_9_and_resume_finishes_the_same(seed: int, options: str, tmp_path: Path) -> None:
    expected = write_recipe(tmp_path, "orchestration.updates=8", *options.split())
    kill(tmp_path, random.Random(seed), updates=8)
    with training(tmp_path, "--resume") as process:
        expect(process, 0)
    check_finished(tmp_path / "runs" / "run")
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["weights_sha256"] == expected


@pytest.mark.slow
def test_the_demo_is_the_same_in_one_process_in_two_and_killed_20_times(tmp_path: Path) -> None:
    """20 updates of it, after its whole warm start; killed at random moments of those, each time resumed."""
    options = ("seed=1", "orchestration.updates=20", "orchestration.checkpoint_every=1")
    two = "engine.own_process=true"
    for name, arguments in {"one": options, "two": (*options, two)}.items():
        with training(tmp_path, *arguments, recipe="demo", name=name) as process:
            process.communicate(timeout=1200)
            assert process.returncode == 0
    draws = random.Random(1)
    for number, moment in enumerate(sorted(draws.uniform(1, 19.5) for _ in range(20))):
        again = ("--resume",) if number else (*options, two)
        with training(tmp_path, *again, recipe="demo", name="killed") as process:
            read_until(process, "resuming" if number else "update")
            wait_for_update(tmp_path, int(moment), process, "killed", 300)
            time.sleep(moment % 1)
            strike(process)
    with training(tmp_path, "--resume", recipe="demo", name="killed") as process:
        expect(process, 0)
    check_finished(tmp_path / "runs" / "killed")
    found = [json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("one", "two", "killed")]
    assert len({summary["weights_sha256"] for summary in found}) == 1
    assert found[0]["updates"] == 20


# Asynchronous: no two runs are the same, but in each every step has one end

ASYNCHRONOUS = ("orchestration.max_staleness=2", "orchestration.updates=8", SLOWLY)


def resumed(process: "subprocess.Popen[str]") -> int:
    """Wait until a resumed run tells how many finished trajectories it reuses; returns that."""
    return int(read_until(process, r"(\d+) finished trajectories \(\d+ steps\) of \d+ groups are reused")[1])


@pytest.mark.parametrize("policy", ["mask_steps", "wait", "drop_group"])
def test_an_asynchronous_run_ends_with_nothing_undecided(policy: str, tmp_path: Path) -> None:
    start(tmp_path / "run", *ASYNCHRONOUS, f"orchestration.stale_policy={policy}")
    check_finished(tmp_path / "run")


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (2, "orchestration.stale_policy=wait"),
        *(
            pytest.param(20, options, marks=pytest.mark.slow)
            for options in (
                "",
                "orchestration.stale_policy=wait",
                "orchestration.stale_policy=drop_group engine.own_process=true",
            )
        ),
    ],
)
def test_an_asynchronous_run_is_killed_over_and_over(kills: int, options: str, tmp_path: Path) -> None:
    """Each process after a while, and what was finished by then is reused; the last one goes to the end."""
    more = (f"orchestration.updates={15 * kills}", "orchestration.checkpoint_every=1", *options.split())
    (tmp_path / "tiny.yaml").write_text(dump_yaml(tiny(*ASYNCHRONOUS, *more)))
    draws, found = random.Random(options), []
    kill(tmp_path, draws, 4)
    for _ in range(kills - 1):
        with training(tmp_path, "--resume") as process:
            found.append(resumed(process))
            time.sleep(draws.random())
            strike(process)
    with training(tmp_path, "--resume") as process:
        found.append(resumed(process))
        expect(process, 0)
    assert max(found) > 0
    check_finished(tmp_path / "runs" / "run")


@pytest.mark.quick(1)
@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGINT, 60), (signal.SIGTERM, 60), (signal.SIGTERM, 0.01)])
def test_an_asynchronous_run_leaves_at_once_when_asked(number: signal.Signals, seconds: float, tmp_path: Path) -> None:
    """While it waits for a batch that would take minutes, and amid updates."""
    (tmp_path / "tiny.yaml").write_text(dump_yaml(tiny(*ASYNCHRONOUS, f"data.train.options.seconds={seconds}")))
    run = tmp_path / "runs" / "run"
    with training(tmp_path) as process:
        if seconds < 1:
            wait_for_update(tmp_path, 2, process)
        while not (run / "checkpoints" / "step-000000").exists() and seconds > 1:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        asked = time.monotonic()
        process.send_signal(number)
        assert "--resume --name run" in expect(process, 130)
        assert time.monotonic() - asked < 20
    put_config(run, dump_yaml(tiny(*ASYNCHRONOUS)))  # an environment that has become quick
    resume(run)
    check_finished(run)


KILLER = """
import json, os, random, signal, sqlite3, sys
from collections import Counter
from pathlib import Path
from tests.orchestration.runs import check_finished, resume, start
from treadle.engines import staging
from treadle.engines.torch.model import CachedModel
from treadle.orchestration.store.ledger import Ledger

folder, options = Path(sys.argv[1]), sys.argv[2].split()
counts, victim, committing = Counter(), None, False

def tick(kind):
    counts[kind] += 1
    if (kind, counts[kind]) == victim:
        os.kill(os.getpid(), signal.SIGKILL)

def before(kind, call):
    return lambda *arguments: (tick(kind), call(*arguments))[1]

def after(kind, call):
    return lambda *arguments: (call(*arguments), tick(kind))[0]

def traced(*arguments, connect=sqlite3.connect, **settings):
    db = connect(*arguments, **settings)
    db.set_trace_callback(lambda statement: tick("commit" if committing else "record"))
    return db

def commit(*arguments, call=Ledger.commit_checkpoint, **settings):
    global committing
    committing = True
    call(*arguments, **settings)
    committing = False

def train(moment):
    global victim
    victim = moment
    os.fsync, Path.replace = before("write", os.fsync), before("write", Path.replace)
    sqlite3.connect, Ledger.commit_checkpoint = traced, commit
    CachedModel.load, staging._write = after("publish", CachedModel.load), after("publish", staging._write)
    start(folder / str(moment), *options)
    (folder / "counts").write_text(json.dumps(counts))

def go_on(moment):
    summary = folder / str(moment) / "summary.json"  # there if the run was killed after its last word
    found = json.loads(summary.read_text()) if summary.is_file() else resume(folder / str(moment))
    (folder / f"{moment}.sha").write_text(found["weights_sha256"])
    check_finished(folder / str(moment))

def in_child(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert in_child(lambda: train(None)) == 0
draws, asynchronous = random.Random(sys.argv[2]), "max_staleness" in sys.argv[2]
for kind, count in json.loads((folder / "counts").read_text()).items():
    for moment in sorted({(kind, draws.randint(max(3, int(0.4 * count)), count)) for _ in range(4)}):
        ended = in_child(lambda: train(moment))
        if ended == 0 and asynchronous:  # it did that less often than the one before
            continue
        assert ended == -signal.SIGKILL, moment
        assert in_child(lambda: go_on(moment)) == 0, moment
        print(kind)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "seed=0",
        "engine.own_process=true training.updates_per_batch=2 orchestration.checkpoint_every=1",
        "orchestration.max_staleness=2 data.train.options.seconds=0.01",
        "orchestration.max_staleness=2 orchestration.checkpoint_every=1 engine.own_process=true",
    ],
)
def test_whatever_was_being_written_when_the_run_was_killed(options: str, tmp_path: Path) -> None:
    """Killed, after the first checkpoint, just before some fsync or rename (shards, checkpoints), between statements
    of the ledger (records, checkpoints), and with new weights in the engine, or staged, but the publication unfinished.
    """
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    killed = Counter(done.stdout.split())
    assert killed.keys() == {"write", "record", "commit", "publish"}
    if "max_staleness" in options:
        assert killed.total() >= 8
        return
    found = [file.read_text() for file in tmp_path.glob("*.sha")]
    assert len(found) == killed.total() >= 10
    assert set(found) == {start(tmp_path / "straight", *options.split())["weights_sha256"]}
