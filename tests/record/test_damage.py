"""Tokens that were damaged on disk are not trained, and cost no more than they hold."""

import os
import shutil
import signal
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import check_finished, query, resume, start
from tests.worlds import Quiet, make_group, make_step
from treadle.core.errors import Cause, DamageError
from treadle.core.metrics import Metric, measured
from treadle.core.types import DropReason, Failure, Group, Status, Trajectory
from treadle.plan.config import config_of
from treadle.record.ledger import Ledger
from treadle.record.ledger_reader import LoopState
from treadle.record.resume import restorable_groups
from treadle.record.rollout_store import write_shard
from treadle.record.run_directory import RunDirectory

ASYNCHRONOUS = ("orchestration.max_staleness=2", "orchestration.updates=5")


class Stopping(Quiet):
    """Ctrl-C after the second update, while groups wait that were sampled beside it."""

    def update(self, row: Any) -> None:
        super().update(row)
        if row["update"] == 2:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run that was stopped. Tests copy it."""
    path = tmp_path_factory.mktemp("waiting") / "run"
    start(path, *ASYNCHRONOUS, progress=Stopping())
    return path


@pytest.fixture
def run(waiting: Path, tmp_path: Path) -> Path:
    return shutil.copytree(waiting, tmp_path / "run")


def shards(path: Path, state: str) -> list[str]:
    """Those that hold training steps in this state."""
    joined = "FROM steps JOIN trajectories USING (trajectory_id) WHERE state = ?"
    return [row["shard"] for row in query(path, f"SELECT DISTINCT shard {joined} ORDER BY 1", state)]


def states(path: Path, shard: str) -> Counter[tuple[str, str | None]]:
    """(state, reason) of the steps in it."""
    joined = "FROM steps JOIN trajectories USING (trajectory_id) WHERE shard = ?"
    return Counter((row["state"], row["reason"]) for row in query(path, f"SELECT state, reason {joined}", shard))


def damage(file: Path) -> bytes:
    """Flip one bit; returns what was there."""
    content = file.read_bytes()
    file.write_bytes(content[:200] + bytes([content[200] ^ 4]) + content[201:])
    return content


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_shard_that_waits_is_skipped_and_its_tasks_are_sampled_again(how: str, run: Path) -> None:
    [name, *_] = shards(run, "recorded")
    file, progress = run / "rollouts" / name, Quiet()
    before = states(run, name)
    steps = before.pop(("recorded", None))
    good = damage(file)
    if how == "gone":
        file.unlink()
    summary = resume(run, progress=progress)
    [line] = [line for line in progress.lines if name in line]
    assert line.startswith(f"{file} is damaged or gone: ") and f"({steps} steps) that waited in it are dropped" in line
    assert "dropped as damaged, and their tasks are sampled again" in line
    assert states(run, name) == before + Counter({("dropped", "damaged"): steps})
    assert summary["updates"] == 5 and not summary["stopped_early"]
    file.write_bytes(good)
    check_finished(run)


@pytest.mark.quick(1)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_shard_that_was_trained_changes_nothing(staleness: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    start(run, f"orchestration.max_staleness={staleness}", "orchestration.updates=2")
    [name, *_] = shards(run, "trained")
    good, progress = damage(run / "rollouts" / name), Quiet()
    before = states(run, name)
    resume(run, config=config_of(RunDirectory.open(run), ["orchestration.updates=3"]), progress=progress)
    assert not any(name in line for line in progress.lines)
    assert states(run, name) == before
    (run / "rollouts" / name).write_bytes(good)
    check_finished(run)


def test_all_that_waits_may_be_damaged(run: Path) -> None:
    names = shards(run, "recorded")
    good = {name: damage(run / "rollouts" / name) for name in names}
    progress = Quiet()
    resume(run, progress=progress)
    assert any(line.startswith("0 finished trajectories (0 steps)") for line in progress.lines)
    for name in names:
        assert not states(run, name)["recorded", None] and states(run, name)["dropped", "damaged"]
        (run / "rollouts" / name).write_bytes(good[name])
    check_finished(run)


def test_a_change_of_configuration_that_was_cut_short_is_none(run: Path) -> None:
    """The ledger knows the new one already, the file is still the old one."""
    directory = RunDirectory.open(run)
    before = directory.config_file.read_bytes()
    changed = config_of(directory, ["orchestration.updates=6"])
    with closing(Ledger(directory.ledger_file)) as ledger:
        directory.change_config(changed, ledger)
    assert config_of(directory) == changed and (run / "config-1.yaml").read_bytes() == before
    directory.config_file.write_bytes(before)
    assert config_of(directory).orchestration.updates == 5
    directory.config_file.write_bytes(before.replace(b"updates: 5", b"updates: 4"))
    with pytest.raises(
        DamageError, match=r"config\.yaml is damaged, or was changed by hand: .*--resume key.path=value"
    ):
        config_of(directory)


def attempt(number: int, version: int, dropped: DropReason | None = None) -> Trajectory:
    step = replace(make_step(), policy_versions=np.full(2, version, np.int32))
    return Trajectory(f"g000000.{number}", "t", number, (step,), 1.0, Status.DONE, dropped=dropped)


def failed(number: int) -> Trajectory:
    failure = Failure(Cause.TIMEOUT, "slow")
    return Trajectory(f"g000000.{number}", "t", number, (make_step(),), None, Status.FAILED, failure)


def kept(folder: Path, group: Group, version: int, pinned: bool = False) -> list[str]:
    """Ids of what is reused by a checkpoint of this version, up to two versions old."""
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.record([group], "train", 0, write_shard(folder, "shard", [group]))
    found = restorable_groups(ledger, folder, LoopState(version=version), 2, pinned)[0]
    ledger.close()
    return [t.trajectory_id for kept in found.values() for t in kept.trajectories]


@pytest.mark.parametrize(("version", "admitted"), [(2, False), (3, True), (5, True), (6, False)])
def test_attempts_must_be_of_versions_that_the_checkpoint_admits(version: int, admitted: bool, tmp_path: Path) -> None:
    group = make_group(0, attempt(0, 3))
    assert kept(tmp_path, group, version) == ["g000000.0"] * admitted


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pinned_attempt_must_be_of_one_version(pinned: bool, tmp_path: Path) -> None:
    mixed = attempt(1, 3)
    mixed = replace(mixed, steps=(*mixed.steps, *attempt(1, 4).steps))
    group = make_group(0, attempt(0, 4), mixed)
    assert kept(tmp_path, group, 5, pinned) == ([] if pinned else ["g000000.0", "g000000.1"])


def test_what_trains_nothing_is_kept_with_its_group(tmp_path: Path) -> None:
    """Cut off and dropped, or failed: whatever version it was, its siblings need not be played again."""
    group = make_group(0, attempt(0, 5), attempt(1, 0, DropReason.OVERLONG), failed(2))
    assert kept(tmp_path, group, 5) == ["g000000.0", "g000000.1", "g000000.2"]


def test_what_an_environment_measured_is_kept(tmp_path: Path) -> None:
    """With its counts: the mean over what is reused and what is sampled then is the mean over all."""
    pages = Metric("pages", "step", "mean", "pages", "read in a step")
    measures = measured("step", {pages: [3, 4]})
    group = make_group(0, replace(attempt(0, 5), metrics=measures))
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.record([group], "train", 0, write_shard(tmp_path, "shard", [group]))
    [found] = restorable_groups(ledger, tmp_path, LoopState(version=5), 2)[0][0].trajectories
    [stored] = ledger.query("SELECT json_extract(metrics, '$.pages.value') AS pages FROM trajectories")
    ledger.close()
    assert stored == {"pages": 3.5}
    assert (found.metrics + measured("step", {pages: [8]}))["pages"] == 5


def test_of_a_group_that_was_sampled_twice_the_newest_is_kept(tmp_path: Path) -> None:
    again = make_group(0, replace(attempt(0, 5), trajectory_id="g000000r1.0"), name="g000000r1")
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for name, group in (("first", make_group(0, attempt(0, 5))), ("second", again)):
        ledger.record([group], "train", 0, write_shard(tmp_path, name, [group]))
    found = restorable_groups(ledger, tmp_path, LoopState(version=5), 2)[0]
    ledger.close()
    assert [(index, group.group_id, len(group.trajectories)) for index, group in found.items()] == [(0, "g000000r1", 1)]
