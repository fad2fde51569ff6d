"""What is recorded is durable, and nobody thinks so who is wrong."""

import asyncio
from pathlib import Path

import pytest

from tests.orchestration.runs import check_finished, query, resume, start
from tests.worlds import Quiet, make_group, make_step
from treadle.core.errors import RunError
from treadle.core.types import Group, Status, Trajectory
from treadle.orchestration.store.ledger import Ledger
from treadle.orchestration.store.run_directory import RunDirectory
from treadle.orchestration.store.run_store import RunStore


def part(index: int) -> Group:
    return make_group(index, Trajectory(f"g{index:06d}.0", "t", 0, (make_step(),), 1.0, Status.DONE))


def record(run: Path, ledger: Ledger, count: int) -> list[BaseException | None]:
    """Several at once, then one more; what each got."""

    async def everyone() -> list[BaseException | None]:
        store = RunStore(RunDirectory(run), ledger)
        first = await asyncio.gather(*(store.record(part(index), 0) for index in range(count)), return_exceptions=True)
        return [*first, *await asyncio.gather(store.record(part(count), 0), return_exceptions=True)]

    return asyncio.run(everyone())


def test_those_that_finish_together_share_a_shard(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    (tmp_path / "rollouts").mkdir()
    assert record(tmp_path, ledger, 3) == [None] * 4
    assert ledger.shards().keys() == {"train-g000000.0.parquet", "train-g000003.0.parquet"}
    assert ledger.shards().keys() == {file.name for file in (tmp_path / "rollouts").iterdir()}
    ledger.close()


def test_a_write_that_fails_fails_for_all_that_were_in_it_and_after_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    got = record(tmp_path / "nowhere", ledger, 3)
    assert [type(error) for error in got] == [RunError] * 4
    assert not ledger.query("SELECT * FROM groups")
    ledger.close()


class Refusing(Quiet):
    """After the second update the run's rollouts cannot be written any more."""

    def __init__(self, rollouts: Path) -> None:
        super().__init__()
        self.rollouts = rollouts

    def update(self, row: object) -> None:
        super().update(row)
        if len(self.rows) == 2:
            self.rollouts.rename(self.rollouts.with_name("away"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_disk_that_refuses_ends_the_run_which_can_be_gone_on_with(staleness: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    options = (f"orchestration.max_staleness={staleness}", "data.train.options.seconds=0.01")
    with pytest.raises(RunError, match=r"could not write .*\.parquet.* then --resume"):
        start(path, *options, "orchestration.updates=6", progress=Refusing(path / "rollouts"))
    (path / "away").rename(path / "rollouts")
    (path / "rollouts" / "train-g000099.0.parquet").write_bytes(b"written, and killed before it was on record")
    resume(path)
    check_finished(path)
    assert not query(path, "SELECT * FROM steps WHERE state = 'recorded'")
