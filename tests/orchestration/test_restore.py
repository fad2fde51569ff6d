"""What a resumed run need not sample again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.worlds import make_group, make_step
from treadle.core.errors import Cause
from treadle.core.metrics import Metric, measured
from treadle.core.types import DropReason, Failure, Group, Status, Trajectory
from treadle.orchestration.store.ledger import Ledger
from treadle.orchestration.store.ledger_reader import LoopState
from treadle.orchestration.store.resume import restorable_groups
from treadle.orchestration.store.rollout_store import write_shard


def attempt(number: int, version: int, dropped: DropReason | None = None) -> Trajectory:
    step = replace(make_step(), policy_versions=np.full(2, version, np.int32))
    return Trajectory(f"g000000.{number}", "t", number, (step,), 1.0, Status.DONE, dropped=dropped)


def failed(number: int) -> Trajectory:
    failure = Failure(Cause.TIMEOUT, "slow")
    return Trajectory(f"g000000.{number}", "t", number, (make_step(),), None, Status.FAILED, failure)


def kept(folder: Path, group: Group, version: int) -> list[str]:
    """Ids of what is reused by a checkpoint of this version, up to two versions old."""
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.record([group], "train", 0, write_shard(folder, "shard", [group]))
    found = restorable_groups(ledger, folder, LoopState(version=version), 2).groups
    ledger.close()
    return [t.trajectory_id for kept in found.values() for t in kept.trajectories]


@pytest.mark.parametrize(("version", "admitted"), [(2, False), (3, True), (5, True), (6, False)])
def test_attempts_must_be_of_versions_that_the_checkpoint_admits(version: int, admitted: bool, tmp_path: Path) -> None:
    group = make_group(0, attempt(0, 3))
    assert kept(tmp_path, group, version) == ["g000000.0"] * admitted


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
    [found] = restorable_groups(ledger, tmp_path, LoopState(version=5), 2).groups[0].trajectories
    [stored] = ledger.query("SELECT json_extract(metrics, '$.pages.value') AS pages FROM trajectories")
    ledger.close()
    assert stored == {"pages": 3.5}
    assert (found.metrics + measured("step", {pages: [8]}))["pages"] == 5


def test_of_a_group_that_was_sampled_twice_the_newest_is_kept(tmp_path: Path) -> None:
    again = make_group(0, replace(attempt(0, 5), trajectory_id="g000000r1.0"), name="g000000r1")
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for name, group in (("first", make_group(0, attempt(0, 5))), ("second", again)):
        ledger.record([group], "train", 0, write_shard(tmp_path, name, [group]))
    found = restorable_groups(ledger, tmp_path, LoopState(version=5), 2).groups
    ledger.close()
    assert [(index, group.group_id, len(group.trajectories)) for index, group in found.items()] == [(0, "g000000r1", 1)]
