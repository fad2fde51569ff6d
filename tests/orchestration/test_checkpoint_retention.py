"""Which checkpoints stay."""

from pathlib import Path
from typing import Any

import pytest

from tests.orchestration.runs import check_finished, start
from tests.worlds import tiny
from treadle.core.errors import RunError
from treadle.orchestration.loop.schedule import pending_evaluations
from treadle.orchestration.store.checkpoint_retention import (
    best_update,
    checkpoint_name,
    checkpoint_updates,
    find_checkpoint,
    retained,
)
from treadle.orchestration.store.ledger_reader import LoopState
from treadle.orchestration.store.run_directory import RunDirectory


def evaluation(update: int, success: float | None, temperature: float = 1.0) -> dict[str, Any]:
    return {"update": update, "temperature": temperature, "success": success, "reward_mean": success}


SEEN = [evaluation(0, 0.1), evaluation(4, 0.5), evaluation(4, 0.9, 0.0), evaluation(8, 0.5), evaluation(10, None)]


def test_the_best_is_the_earliest_of_equals_at_the_evaluations_temperature() -> None:
    assert best_update(SEEN, "held_out_success", 1.0) == 4
    assert best_update(SEEN, "held_out_reward", 1.0, among=[0, 8, 10]) == 8
    assert best_update(SEEN, "held_out_success", 0.5) is None
    assert best_update(SEEN, "held_out_success", 1.0, among=[]) is None


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ((), [9, 10]),
        (("orchestration.keep_last=1",), [10]),
        (("orchestration.keep_every=3",), [3, 6, 9, 10]),
        (("orchestration.keep_best=held_out_success",), [4, 9, 10]),
        (("orchestration.keep_every=5", "orchestration.keep_best=held_out_reward"), [4, 5, 9, 10]),
    ],
)
def test_what_is_retained(options: tuple[str, ...], kept: list[int]) -> None:
    names = retained(range(11), tiny(*options), SEEN)
    assert names == [f"step-{update:06d}" for update in kept]


def test_a_run_keeps_the_best_and_every_so_many(tmp_path: Path) -> None:
    options = ("evaluation.every=1", "orchestration.keep_best=held_out_reward", "orchestration.keep_last=1")
    start(tmp_path, *options, "orchestration.keep_every=3", "orchestration.checkpoint_every=100")
    run = RunDirectory.open(tmp_path)
    rows = [row for row in run.metrics() if row["kind"] == "evaluation"]
    assert [row["update"] for row in rows] == [0, 1, 2, 3, 4]
    best = best_update(rows, "held_out_reward", 1.0)
    assert best is not None
    assert checkpoint_updates(run.checkpoints) == sorted({best, 3, 4})
    check_finished(tmp_path)
    assert find_checkpoint(tmp_path, "best").directory.name == checkpoint_name(best)
    for other in checkpoint_updates(run.checkpoints):
        (run.checkpoints / checkpoint_name(other)).rename(tmp_path / f"away-{other}")
    with pytest.raises(
        RunError, match=f"was best at update {best}, whose checkpoint is gone: it was removed; it has none"
    ):
        find_checkpoint(tmp_path, "best")


def test_evaluations_are_due_after_a_batch_that_steps_over_a_multiple_and_at_both_ends() -> None:
    """And each temperature once: what is on record of an update is not made again."""
    options = ("evaluation.every=3", "evaluation.greedy_too=true", "orchestration.updates=10")
    config = tiny("training.updates_per_batch=2", *options)
    due = {update: pending_evaluations(config, LoopState(update=update)) for update in range(0, 11, 2)}
    assert due == {0: [1.0, 0.0], 2: [], 4: [1.0], 6: [1.0], 8: [], 10: [1.0, 0.0]}
    assert pending_evaluations(config, LoopState(update=4, evaluations=(evaluation(4, 0.5),))) == []
    assert pending_evaluations(config, LoopState(update=4, evaluations=(evaluation(2, 0.5),))) == [1.0]
    assert pending_evaluations(config, LoopState(update=10, evaluations=(evaluation(10, 0.5),))) == [0.0]
