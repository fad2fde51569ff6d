"""Tokens that were damaged on disk are not trained, and cost no more than they hold."""

import os
import shutil
import signal
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.orchestration.runs import check_finished, query, resume, start
from tests.worlds import Quiet
from treadle.core.errors import DamageError
from treadle.orchestration.store.ledger import Ledger
from treadle.orchestration.store.run_directory import RunDirectory

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
    resume(run, config=RunDirectory.open(run).config(["orchestration.updates=3"]), progress=progress)
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
    changed = directory.config(["orchestration.updates=6"])
    with closing(Ledger(directory.ledger_file)) as ledger:
        directory.change_config(changed, ledger)
    assert directory.config() == changed and (run / "config-1.yaml").read_bytes() == before
    directory.config_file.write_bytes(before)
    assert directory.config().orchestration.updates == 5
    directory.config_file.write_bytes(before.replace(b"updates: 5", b"updates: 4"))
    with pytest.raises(
        DamageError, match=r"config\.yaml is damaged, or was changed by hand: .*--resume key.path=value"
    ):
        directory.config()
